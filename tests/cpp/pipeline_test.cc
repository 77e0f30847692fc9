// One training step through the algorithms, three ranks in one process with several threads each: deduplicate, partition,
// look up at the owner, bring the rows back, and the gradients the other way. Every id gets its row, and every row the sum
// of the gradients of all its occurrences on all ranks.
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "hash_table/batches.h"
#include "check.h"
#include "common/bucket.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "rank_partition/rank_partition.h"
#include "recovery/recovery.h"
#include "segment_unique/segment_unique.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kRanks = 3, kDim = 4, kSegments = 3, kFeatures = 4;  // two features have the first segment

struct Rank {
  std::vector<int64_t> ids, splits, unique, unique_splits, message;
  std::vector<int32_t> inverse, send_splits, id_splits, restore;
  std::vector<float> rows;   // [U, D], in the order of `restore`
  std::vector<float> grads;  // the same
};

// Steps 1 and 2. `size` ids of each feature; the last rank of an uneven step has none.
Rank Send(int size, const ParallelFor& parallel_for, std::mt19937_64* random) {
  const int64_t n = kFeatures * size;
  Rank rank;
  for (int64_t i = 0; i < n; ++i) rank.ids.push_back(static_cast<int64_t>((*random)() % (size / 3 + 1)) - 5);
  rank.splits = {0, 2 * size, 3 * size, n};
  rank.unique.resize(n);
  rank.unique_splits.resize(kSegments + 1);
  rank.inverse.resize(n);
  const int64_t unique = SegmentUnique(rank.ids, rank.splits, parallel_for, absl::MakeSpan(rank.unique),
                                       absl::MakeSpan(rank.unique_splits), absl::MakeSpan(rank.inverse));
  rank.unique.resize(unique);
  rank.message.resize(BucketedSize(unique + kRanks * kSegments));
  rank.send_splits.resize(kRanks);
  rank.id_splits.resize(kRanks);
  rank.restore.resize(unique);
  RankPartition(rank.unique, rank.unique_splits, Owner::kHashRange, parallel_for, absl::MakeSpan(rank.message),
                absl::MakeSpan(rank.send_splits), absl::MakeSpan(rank.id_splits), absl::MakeSpan(rank.restore));
  rank.rows.resize(unique * kDim);
  rank.grads.resize(unique * kDim);
  return rank;
}

// Returns the begin of owner `r`'s part in an array with `splits` entries for each owner.
int64_t Begin(const std::vector<int32_t>& splits, int r) {
  int64_t begin = 0;
  for (int i = 0; i < r; ++i) begin += splits[i];
  return begin;
}

// Steps 4 to 8 at owner `r`: rows to all ranks, their gradients back, the update.
void Serve(int r, HashTable* table, std::vector<Rank>* ranks, const ParallelFor& parallel_for) {
  std::vector<int64_t> message;
  std::vector<int32_t> splits;
  for (const Rank& rank : *ranks) {
    const auto begin = rank.message.begin() + Begin(rank.send_splits, r);
    message.insert(message.end(), begin, begin + rank.send_splits[r]);
    splits.push_back(rank.send_splits[r]);
  }
  CHECK_OK(CheckMessage(message, splits, kSegments));
  const int64_t num_ids = static_cast<int64_t>(message.size()) - kRanks * kSegments;
  std::vector<float> rows(num_ids * kDim), grads(num_ids * kDim);
  std::vector<int32_t> inverse(num_ids);
  std::vector<int64_t> handles(num_ids);
  std::vector<int32_t> left_out;
  int64_t num_rows;
  CHECK_OK(table->Lookup({parallel_for}, {message, splits, num_ids}, 1, nullptr, {rows.data(), Storage::kFloat32, 0},
                         inverse.data(), handles.data(), &num_rows));
  handles.resize(num_rows);
  int64_t at = 0;
  for (Rank& rank : *ranks) {
    const int64_t begin = Begin(rank.id_splits, r) * kDim, count = rank.id_splits[r] * kDim;
    std::copy_n(rows.begin() + at, count, rank.rows.begin() + begin);
    std::copy_n(rank.grads.begin() + begin, count, grads.begin() + at);
    at += count;
  }
  CHECK_OK(table->Apply({parallel_for}, {handles, inverse, grads.data(), Storage::kFloat32, 1.0f}, {0.5f, 1}, &left_out));
}

void Steps(int threads) {
  const ParallelFor parallel_for = Threads(threads);
  TableSpec spec;
  spec.dim = kDim;
  spec.seeds = {1, 2, 3};
  spec.distribution = Distribution::kConstant;  // with gradients of small integers all sums are exact
  spec.a = 8.0;
  std::vector<std::unique_ptr<HashTable>> tables;
  for (int r = 0; r < kRanks; ++r) tables.push_back(MakeTable(spec));
  std::map<Received, float> wanted;
  std::mt19937_64 random(threads);
  for (int step = 0; step < 4; ++step) {
    std::vector<Rank> ranks;
    for (const int size : {700, 3000, step % 2 * 100}) ranks.push_back(Send(size, parallel_for, &random));
    std::map<Received, float> sums;
    for (Rank& rank : ranks) {
      std::vector<int32_t> index(rank.ids.size());
      for (size_t n = 0; n < index.size(); ++n) index[n] = rank.restore[rank.inverse[n]];
      std::vector<float> grads(rank.ids.size() * kDim);
      for (size_t n = 0, segment = 0; n < rank.ids.size(); ++n) {
        while (static_cast<int64_t>(n) >= rank.splits[segment + 1]) ++segment;
        const float grad = static_cast<float>(random() % 5) - 2.0f;
        for (int d = 0; d < kDim; ++d) grads[n * kDim + d] = grad;
        sums[{static_cast<int64_t>(segment), rank.ids[n]}] += grad;
      }
      std::vector<int32_t> begin(rank.unique.size() + 2);
      PooledRecoverGrad(grads.data(), kDim, index, {}, {}, parallel_for, begin.data(), rank.grads.data(),
                        static_cast<int64_t>(rank.unique.size()));
    }
    for (int r = 0; r < kRanks; ++r) Serve(r, tables[r].get(), &ranks, parallel_for);
    for (const Rank& rank : ranks) {
      std::vector<int32_t> index(rank.ids.size());
      for (size_t n = 0; n < index.size(); ++n) index[n] = rank.restore[rank.inverse[n]];
      std::vector<float> rows(rank.ids.size() * kDim);
      Recover(reinterpret_cast<const char*>(rank.rows.data()), kDim * sizeof(float), index, parallel_for,
              reinterpret_cast<char*>(rows.data()), rank.ids.size());
      for (size_t n = 0, segment = 0; n < rank.ids.size(); ++n) {
        while (static_cast<int64_t>(n) >= rank.splits[segment + 1]) ++segment;
        const Received key = {static_cast<int64_t>(segment), rank.ids[n]};
        const float row = wanted.emplace(key, 8.0f).first->second;
        for (int d = 0; d < kDim; ++d) CHECK_EQ(rows[n * kDim + d], row, "segment ", segment, ", id ", key.id);
      }
    }
    for (const auto& [key, sum] : sums) wanted.at(key) -= 0.5f * sum;
  }
  std::vector<int64_t> sizes(kSegments);
  for (const auto& [key, row] : wanted) ++sizes[key.segment];
  for (int64_t s = 0; s < kSegments; ++s) {
    int64_t size = 0;
    for (const auto& table : tables) {
      CHECK(table->size(s) > 0, "a rank owns nothing");
      size += table->size(s);
    }
    CHECK_EQ(size, sizes[s], "each id has one owner");
  }
}

}  // namespace
}  // namespace fusedrec

TEST(pipeline) {
  for (const int threads : {1, 3}) fusedrec::Steps(threads);
}
