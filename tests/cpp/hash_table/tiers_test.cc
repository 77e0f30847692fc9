// Two pools. A table whose rows spill to a file answers and trains bit by bit like one in memory, by several sources, in
// any order of batches; rows of a mixed table begin in 16 bits and move to float32 once they have come often enough.
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "batches.h"
#include "check.h"
#include "folder.h"
#include "grids.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

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

// From `sources` sources the same segments of ids, some in all of them.
Batch Overlapping(int sources, int ids_per_segment, int64_t vocabulary, std::mt19937_64* random) {
  Batch batch(sources, std::vector<Ids>(2));
  for (std::vector<Ids>& source : batch) {
    for (Ids& ids : source) {
      for (int n = 0; n < ids_per_segment; ++n) ids.push_back((*random)() % vocabulary);
    }
  }
  return batch;
}

std::vector<float> Gradients(size_t n, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> grads(n);
  for (float& grad : grads) grad = normal(*random);
  return grads;
}

void CheckSameRecords(const HashTable& got, const HashTable& wanted) {
  for (int64_t segment = 0; segment < 2; ++segment) {
    const auto ours = Records(got, segment), theirs = Records(wanted, segment);
    CHECK_EQ(ours.size(), theirs.size());
    for (size_t i = 0; i < ours.size(); ++i) {
      CHECK_EQ(ours[i].first, theirs[i].first);
      const Record &a = ours[i].second, &b = theirs[i].second;
      CHECK(a.last == b.last && a.count == b.count && a.updated == b.updated, "id ", ours[i].first);
      CHECK(a.numbers == b.numbers, "id ", ours[i].first);
    }
  }
}

void SpillingChangesNothing(const ParallelFor& parallel_for) {
  constexpr int kDim = 12;
  const Folder folder;
  TableSpec spec = Spec(kDim);
  const std::unique_ptr<HashTable> plain = MakeTable(spec, "adagrad", {0.0f, 0.1f, 1e-7f, 0.0f, 0.0f});
  spec.memory_budget = 400 * plain->format(0).stride();
  spec.tier_folder = folder.name();
  const std::unique_ptr<HashTable> tiered = MakeTable(spec, "adagrad", {0.0f, 0.1f, 1e-7f, 0.0f, 0.0f});
  std::mt19937_64 random(8);
  for (int64_t step = 1; step <= 60; ++step) {
    // Up to 4 * 2 * 45 = 360 distinct rows of 2 * 800.
    const Packed packed(Overlapping(1 + step % 4, 45, 800, &random));
    if (step % 3 == 0) tiered->Prefetch(packed.message());
    const Answer wanted = MustLookUp(plain.get(), packed), got = MustLookUp(tiered.get(), packed, parallel_for);
    CHECK(got.rows == wanted.rows, "step ", step);
    CHECK(tiered->rows_in_pool(0) <= 400, "step ", step);
    CHECK_EQ(tiered->rows_in_pool(0) + tiered->rows_in_pool(1), plain->rows_in_pool(0));
    const std::vector<float> grads = Gradients(packed.received().size() * kDim, &random);
    plain->Apply(wanted.handles, wanted.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.1f, step}, SerialFor);
    tiered->Apply(got.handles, got.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.1f, step}, parallel_for);
    const Packed other(Overlapping(2, 100, 1000, &random));  // unknown ids among them
    CHECK(FindRows(*tiered, other) == FindRows(*plain, other), "step ", step);
    if (step % 10 == 0) {
      const Ids ids = {1, 2, 3, 4, 5, 6, 7, 8};
      CHECK_EQ(tiered->Remove(1, ids), plain->Remove(1, ids));
    }
  }
  CHECK(tiered->rows_in_pool(1) > 800, "nothing spilled");
  CheckSameRecords(*tiered, *plain);
}

// 100 rows are in memory, 200 in the file; then one batch brings 100 of the latter, each from four sources: 100 rows
// must come, not 400.
void RowsOfSeveralSourcesAreCountedOnce() {
  const Folder folder;
  TableSpec spec = Spec(4);
  spec.memory_budget = 100 * RowFormat(Storage::kFloat32, 4, 0, 0, false).stride();
  spec.tier_folder = folder.name();
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const auto ids_from = [](int64_t begin) {
    Ids ids;
    for (int64_t id = begin; id < begin + 100; ++id) ids.push_back(id);
    return ids;
  };
  for (const int64_t begin : {0, 100, 200}) MustLookUp(table.get(), Packed(Batch{{ids_from(begin), Ids{}}}));
  CHECK_EQ(table->rows_in_pool(1), 200);
  MustLookUp(table.get(), Packed(Batch(4, {ids_from(0), Ids{}})));
  CHECK_EQ(table->rows_in_pool(0), 100);
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

// With one number of optimizer state and at least 64 columns, cold rows have at most 0.55 of the bytes of hot rows.
void ColdRowsAreSmall() {
  for (const int dim : {64, 128, 512}) {
    const RowFormat hot(Storage::kFloat32, dim, 0, 1, false), cold(Storage::kFloat16, dim, 0, 1, false);
    CHECK(cold.stride() <= 0.55 * hot.stride(), "", cold.stride(), " bytes beside ", hot.stride());
  }
}

// Cold rows have 16 bits, hot ones 32; at the lookup that makes a row hot its number stays what it was.
void RowsGetHot() {
  constexpr int kDim = 4, kHotAfter = 3;
  TableSpec spec = Spec(kDim);
  spec.hot_after = kHotAfter;
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const Grid half(Storage::kFloat16);
  const auto rounded = [&](double x) { return static_cast<float>(half.ValueOf(half.Nearest(x))); };
  std::map<int64_t, std::vector<float>> rows;
  std::map<int64_t, int> counts;
  std::mt19937_64 random(9);
  for (int64_t step = 1; step <= 40; ++step) {
    const Packed packed(Batch{{Ids{static_cast<int64_t>(random() % 30), static_cast<int64_t>(random() % 30)}, Ids{}},
                              {Ids{static_cast<int64_t>(random() % 5)}, Ids{}}});
    std::set<int64_t> distinct;
    for (const Received& key : packed.received()) distinct.insert(key.id);
    for (const int64_t id : distinct) {
      if (++counts[id] > 1) continue;
      std::vector<float>& row = rows[id];
      row.resize(kDim);
      InitialRow(spec.distribution, spec.a, spec.b, spec.seeds[0], id, absl::MakeSpan(row));
      for (float& x : row) x = rounded(x);
    }
    const Answer answer = MustLookUp(table.get(), packed, Threads(step % 2 + 1));
    CHECK_EQ(answer.handles.size(), distinct.size());
    const std::vector<float> grads = Gradients(packed.received().size() * kDim, &random);
    std::map<int64_t, std::vector<float>> sums;
    for (size_t v = 0; v < packed.received().size(); ++v) {
      const int64_t id = packed.received()[v].id;
      sums[id].resize(kDim, 0.0f);
      for (int d = 0; d < kDim; ++d) {
        CHECK_EQ(answer.rows[v * kDim + d], rows[id][d], "id ", id, ", step ", step);
        sums[id][d] += grads[v * kDim + d];
      }
    }
    table->Apply(answer.handles, answer.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.1f, step}, SerialFor);
    for (const int64_t id : distinct) {
      for (int d = 0; d < kDim; ++d) {
        const float trained = rows[id][d] - 0.1f * sums[id][d];
        rows[id][d] = counts[id] >= kHotAfter ? trained : rounded(trained);
      }
    }
  }
  int64_t hot = 0;
  for (const auto& [id, record] : RecordsById(*table, 0)) {
    CHECK(record.numbers == rows.at(id), "id ", id);
    CHECK_EQ(record.count, static_cast<uint32_t>(counts.at(id)), "id ", id);
    CHECK_EQ(record.pool, counts.at(id) >= kHotAfter ? 0u : 1u, "id ", id);
    hot += record.pool == 0;
  }
  CHECK_EQ(table->rows_in_pool(0), hot);
  CHECK_EQ(table->rows_in_pool(1), table->size(0) - hot);
  CHECK(hot > 4 && hot < table->size(0));
}

}  // namespace
}  // namespace fusedrec

TEST(tiers) {
  using namespace fusedrec;
  SpillingChangesNothing(SerialFor);
  SpillingChangesNothing(Threads(3));
  RowsOfSeveralSourcesAreCountedOnce();
  TableSpec mixed = Spec(4), tiered = Spec(4);
  mixed.hot_after = 2;
  RowsOfTheBatchDoNotLeave(mixed);
  const Folder folder;
  tiered.memory_budget = 20 * RowFormat(Storage::kFloat32, 4, 0, 0, false).stride();
  tiered.tier_folder = folder.name();
  RowsOfTheBatchDoNotLeave(tiered);
  RowsGetHot();
  ColdRowsAreSmall();
}
