// Two pools: which rows move between them, and how many. tests/ops/hash_table/test_storage.py compares their values.
#include <memory>
#include <vector>

#include "batches.h"
#include "check.h"
#include "folder.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {
namespace {

TableSpec Spec(int dim) {
  TableSpec spec;
  spec.dim = dim;
  spec.distribution = Distribution::kNormal;
  spec.b = 0.5;
  spec.seeds = {3, 4};
  return spec;
}

// Rows of a batch that lie in the second pool are not the ones that leave to make room for its new rows, although they
// are the oldest: 20 rows, of which the batch brings the 10 oldest, and 10 new ones.
void RowsOfTheBatchDoNotLeave(TableSpec spec) {
  spec.limits.assign(spec.seeds.size(), {20, Eviction::kLru});
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const auto ids_from = [](int64_t begin) { return Ids{begin, begin + 1, begin + 2, begin + 3, begin + 4}; };
  for (const int64_t begin : {0, 5, 10, 15}) MustLookUp(table.get(), Packed(Batch{{ids_from(begin), Ids{}}}));
  const Packed packed(Batch{{ids_from(0), Ids{}}, {ids_from(5), Ids{}}, {ids_from(100), Ids{}}, {ids_from(105), Ids{}}});
  const Answer answer = MustLookUp(table.get(), packed);
  CHECK_EQ(answer.handles.size(), 20u);
  const auto records = RecordsById(*table, 0);
  for (const int64_t id : {0, 5, 9}) CHECK_EQ(records.at(id).count, 2u, "id ", id);
  for (const int64_t id : {100, 109}) CHECK_EQ(records.at(id).count, 1u, "id ", id);
}

}  // namespace
}  // namespace fusedrec

TEST(tiers) {
  using namespace fusedrec;
  TableSpec mixed = Spec(4), tiered = Spec(4);
  mixed.hot_after = 2;
  RowsOfTheBatchDoNotLeave(mixed);
  const Folder folder;
  tiered.memory_budget = 20 * RowFormat(Storage::kFloat32, 4, 0, 0, false).stride();
  tiered.tier_folder = folder.name();
  RowsOfTheBatchDoNotLeave(tiered);
}
