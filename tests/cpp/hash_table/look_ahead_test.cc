// A table whose lookups begin from look-aheads and run on three threads is, after every step, the table whose lookups do
// neither: answers, records, counters, who was evicted; whatever the policy, and whatever happens between look-ahead and
// lookup. tests/ops/hash_table/test_properties.py compares the policies with a dictionary.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "batches.h"
#include "check.h"
#include "folder.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kDim = 3, kSteps = kRacesAlone ? 12 : 60;

TableSpec Spec() {
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kUniform;
  spec.b = 1.0;
  spec.seeds = {9, 10};
  return spec;
}

struct Seen {
  std::vector<float> rows;
  std::vector<int64_t> handles;
  Ahead mark{};
};

Seen See(HashTable& table, const Packed& packed) {
  Seen seen;
  seen.rows.assign(packed.received().size() * kDim, -7.0f);
  seen.handles.resize(packed.received().size());
  CHECK_OK(table.LookAhead({Threads(3)}, packed.message(), Out(&seen.rows), absl::MakeSpan(seen.handles), &seen.mark));
  return seen;
}

Answer LookUpFrom(HashTable* table, const Packed& packed, Seen seen) {
  seen.mark.handles = seen.handles;
  Answer answer = LookUp(table, packed, Threads(3), &seen.mark, std::move(seen.rows));
  CHECK_OK(answer.status);
  return answer;
}

Batch RandomBatch(std::mt19937* random, int64_t range) {
  Batch batch(2, std::vector<Ids>(2));
  for (std::vector<Ids>& source : batch) {
    for (Ids& ids : source) {
      for (int n = (*random)() % 20; n > 0; --n) ids.push_back((*random)() % range);
    }
  }
  return batch;
}

void Update(HashTable* table, const Answer& answer, int64_t step, const ParallelFor& parallel_for) {
  std::vector<float> grads(answer.rows.size());
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = 0.1f * answer.rows[i] + 0.01f * (i % 7);
  CHECK_OK(Apply(table, answer, grads, {0.1f, step}, parallel_for));
}

void CheckSame(HashTable& got, HashTable& wanted, bool tiered) {
  CHECK_EQ(got.clock(), wanted.clock());
  CHECK_EQ(got.version(), wanted.version());
  for (int64_t segment = 0; segment < 2; ++segment) {
    const auto a = Records(got, segment), b = Records(wanted, segment);
    CHECK_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      CHECK_EQ(a[i].first, b[i].first);
      CHECK_EQ(a[i].second.last, b[i].second.last);
      CHECK_EQ(a[i].second.count, b[i].second.count);
      CHECK_EQ(a[i].second.updated, b[i].second.updated);
      CHECK(tiered || a[i].second.pool == b[i].second.pool);
      CHECK(a[i].second.numbers == b[i].second.numbers, "id ", a[i].first);
    }
    const SegmentStatistics x = got.StatisticsOf(segment), y = wanted.StatisticsOf(segment);
    CHECK_EQ(x.hits, y.hits);
    CHECK_EQ(x.inserts, y.inserts);
    CHECK_EQ(x.evictions, y.evictions);
    CHECK_EQ(x.refused, y.refused);
    CHECK_EQ(x.candidates, y.candidates);
  }
}

// `disturb` does something to a table between look-ahead and lookup.
template <typename Disturb>
void Equal(const TableSpec& spec, int64_t range, const Disturb& disturb) {
  const auto adam = [&] { return MakeTable(spec, "adam", {0.9f, 0.999f, 1e-8f, 0.0f, 0.0f}); };
  const std::unique_ptr<HashTable> table = adam(), plain = adam();
  std::mt19937 random(5);
  Packed now(RandomBatch(&random, range));
  std::vector<int64_t> handles(now.received().size());
  Ahead mark;
  // Handles alone, as a table with rows on a device asks for them.
  CHECK_OK(table->LookAhead({SerialFor}, now.message(), {}, absl::MakeSpan(handles), &mark));
  Seen seen = See(*table, now);
  CHECK(handles == seen.handles);
  int64_t changed = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const std::vector<float> before = seen.rows;
    const std::vector<int64_t> had = seen.handles;
    const Answer got = LookUpFrom(table.get(), now, std::move(seen)), wanted = MustLookUp(plain.get(), now);
    CHECK(got.rows == wanted.rows, "step ", step);
    CHECK(got.inverse == wanted.inverse);
    for (size_t v = 0; v < had.size(); ++v) {
      changed += had[v] != kNoRow && !std::equal(&before[v * kDim], &before[v * kDim] + kDim, &got.rows[v * kDim]);
    }
    const Packed next(RandomBatch(&random, range));
    seen = See(*table, next);  // before the update
    See(*table, Packed(RandomBatch(&random, range)));  // one that no lookup follows
    Update(table.get(), got, step, Threads(3));
    Update(plain.get(), wanted, step, SerialFor);
    CheckSame(*table, *plain, spec.memory_budget > 0);
    disturb(table.get(), step);
    disturb(plain.get(), step);
    now = next;
  }
  CHECK(kRacesAlone || changed > kSteps, "updates changed only ", changed, " of the rows seen ahead");
}

void Nothing(HashTable*, int64_t) {}

void Policies() {
  Equal(Spec(), 60, Nothing);
  const auto limited = [](const Limits& first, const Limits& second) {
    TableSpec spec = Spec();
    spec.limits = {first, second};
    return spec;
  };
  const Limits lru_at_90{90, Eviction::kLru}, lfu_at_90{90, Eviction::kLfu}, ttl_of_4{0, Eviction::kNone, 4};
  const Limits admission_of_3{0, Eviction::kNone, 0, 3};
  TableSpec lru = limited(lru_at_90, lru_at_90), hot = Spec(), narrow = Spec();
  lru.record_tombstones = true;
  Equal(lru, 150, Nothing);
  Equal(limited(lfu_at_90, lfu_at_90), 150, Nothing);
  Equal(limited(ttl_of_4, ttl_of_4), 150, Nothing);
  Equal(limited(admission_of_3, admission_of_3), 60, Nothing);
  Equal(limited(lru_at_90, ttl_of_4), 150, Nothing);
  Equal(limited(admission_of_3, {}), 60, Nothing);
  hot.hot_after = 4;
  Equal(hot, 60, Nothing);
  hot.limits.resize(hot.seeds.size());
  for (Limits& limits : hot.limits) limits.frequency_decay_steps = 5;
  Equal(hot, 60, Nothing);
  hot.stochastic_rounding = true;
  Equal(hot, 60, Nothing);
  narrow.storage = Storage::kBfloat16;
  narrow.stochastic_rounding = true;
  Equal(narrow, 60, Nothing);
}

void Tier() {
  const Folder folder;
  TableSpec spec = Spec();
  spec.tier_folder = folder.name();
  spec.memory_budget = 120 * 56;
  Equal(spec, 150, Nothing);
}

// Handles and rows of the look-ahead are worth nothing any more.
void Disturbed() {
  TableSpec lru = Spec();
  lru.limits.assign(lru.seeds.size(), {1000, Eviction::kLru});
  Equal(lru, 60, [](HashTable* table, int64_t step) {
    if (step % 3 == 0) Evict(table, 0, 5);
    if (step % 4 == 0) Remove(table, 1, {1, 2, 3, 4, 5, 6, 7, 8});
  });
  Equal(Spec(), 60, [](HashTable* table, int64_t step) {  // rows of another time come back
    static std::map<const HashTable*, std::pair<Ids, std::vector<char>>> saved;
    auto& [ids, records] = saved[table];
    if (step % 5 == 1) {
      std::vector<int64_t> handles;
      ids.clear();
      CHECK_OK(table->Keys({Threads(2)}, 0, {}, &ids, &handles));
      records.resize(ids.size() * table->record_bytes());
      CHECK_OK(table->ReadRecords({Threads(2)}, handles, records.data()));
    }
    if (step % 5 == 4) CHECK_OK(table->Import({Threads(3)}, 0, ids, records.data()));
  });
  Equal(Spec(), 30, [](HashTable* table, int64_t step) {
    if (step == 20) CHECK_OK(table->Clear({SerialFor}));
    if (step == 40) table->SetClock({1000, 1000});
  });
  Equal(Spec(), 60, [](HashTable* table, int64_t step) {  // another lookup in between makes rows
    MustLookUp(table, Packed(Batch(1, {Ids{step, step + 20}, Ids{step}})));
  });
}

}  // namespace
}  // namespace fusedrec

TEST(look_ahead) {
  fusedrec::Policies();
  fusedrec::Tier();
  fusedrec::Disturbed();
}
