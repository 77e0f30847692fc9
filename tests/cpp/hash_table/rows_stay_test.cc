// Rows never move: pools grow by whole chunks and the addresses of earlier rows stay; a table that grows a thousandfold
// answers the same handles, and only rows that are touched change.
#include <cstring>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/row_store.h"

namespace fusedrec {
namespace {

void AddressesStay() {
  auto made = RowPool::Make(RowFormat(Storage::kFloat32, 1000, 0, 0, false), "");  // 4096 rows a chunk
  CHECK_OK(made.status());
  RowPool& pool = **made;
  std::vector<char*> rows;
  for (int block = 0; block < 400; ++block) {
    uint32_t first;
    CHECK_OK(pool.TakeBlock(&first));
    CHECK_EQ(first, RowPool::kBlockRows * block);
    CHECK_EQ(pool.rows(), first + RowPool::kBlockRows);
    rows.push_back(pool.Row(first));
    std::memset(rows.back(), block % 128, RowPool::kBlockRows * pool.format().stride());  // a block is contiguous
  }
  for (size_t block = 0; block < rows.size(); ++block) {
    CHECK(pool.Row(RowPool::kBlockRows * block) == rows[block], "block ", block);
    for (int64_t i = 0; i < int64_t{RowPool::kBlockRows} * pool.format().stride(); i += 997) {
      CHECK_EQ(int{rows[block][i]}, static_cast<int>(block % 128), "block ", block);
    }
  }
}

void HandlesStay() {
  constexpr int kDim = 3;
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kUniform;
  spec.b = 1.0;
  spec.seeds = {9};
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  Batch few(1, std::vector<Ids>(1));
  for (int64_t id = 0; id < 100; ++id) few[0][0].push_back(id);
  const Packed packed(few);
  const Answer before = MustLookUp(table.get(), packed);
  const int64_t key_bytes = table->key_bytes();
  for (int64_t begin = 100; begin < 100'000; begin += 9990) {
    Batch more(1, std::vector<Ids>(1));
    for (int64_t id = begin; id < begin + 9990; ++id) more[0][0].push_back(id);
    MustLookUp(table.get(), Packed(more));
  }
  CHECK_EQ(table->size(0), 100'000);
  CHECK(table->key_bytes() > 100 * key_bytes, "the keys did not grow");
  const Answer after = MustLookUp(table.get(), packed);
  CHECK(after.rows == before.rows);
  for (size_t v = 0; v < packed.received().size(); ++v) {
    // The number of the row; the clock of the lookup stands above it.
    CHECK_EQ(static_cast<uint32_t>(after.handles[after.inverse[v]]),
             static_cast<uint32_t>(before.handles[before.inverse[v]]), "id ", v);
  }
}

}  // namespace
}  // namespace fusedrec

TEST(rows_stay) {
  static_assert((uint32_t{1} << 31 | (fusedrec::RowPool::kMaxRows - 1)) != fusedrec::kAbsent,
                "the handle of the last row of pool 1");
  fusedrec::AddressesStay();
  fusedrec::HandlesStay();
}
