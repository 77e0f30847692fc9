// HashTable against a map (table_model.h): random batches from several sources, updates, removals and evictions, under
// every policy, by one thread and by three.
#include "hash_table/cpu/hash_table.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "batches.h"
#include "check.h"
#include "common/hash.h"
#include "table_model.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kSegments = 3;

struct Case {
  std::string name;
  TableSpec spec;
};

TableSpec Spec() {
  TableSpec spec;
  spec.dim = 5;
  spec.distribution = Distribution::kUniform;
  spec.a = -1.0;
  spec.b = 1.0;
  spec.seeds = {11, 12, ~uint64_t{0}};
  spec.limits.resize(spec.seeds.size());
  spec.record_tombstones = true;
  return spec;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, auto... changes) {
    TableSpec spec = Spec();
    (changes(&spec), ...);
    cases.push_back({name, spec});
  };
  const auto all = [](auto change) {
    return [=](TableSpec* spec) { std::for_each(spec->limits.begin(), spec->limits.end(), change); };
  };
  const auto limit = [=](int64_t rows, Eviction eviction) {
    return all([=](Limits& of) { of.max_rows = rows, of.eviction = eviction; });
  };
  const auto ttl = [=](int64_t lookups) { return all([=](Limits& of) { of.ttl = lookups; }); };
  const auto admission = [=](int64_t count, int64_t max) {
    return all([=](Limits& of) { of.admission_count = count, of.max_candidates = max; });
  };
  const auto by_segment = [](Limits first, Limits second, Limits third) {
    return [=](TableSpec* spec) { spec->limits = {first, second, third}; };
  };
  const auto window = [](int64_t lookups) { return [=](TableSpec* spec) { spec->window = lookups; }; };
  add("no limit");
  add("max_rows alone", limit(150, Eviction::kNone));
  add("LRU", limit(60, Eviction::kLru));
  add("LFU", limit(60, Eviction::kLfu));
  add("LFU, counts decay", limit(60, Eviction::kLfu), all([](Limits& of) { of.frequency_decay_steps = 12; }));
  add("LRU, too small at times", limit(20, Eviction::kLru));
  add("LRU, window 3", limit(90, Eviction::kLru), window(3));
  add("TTL 3", ttl(3));
  add("TTL 40, looked for every second lookup", ttl(40));
  add("TTL 2, window 5", ttl(2), window(5));
  add("admission 3", admission(3, 0));
  add("admission 4, few candidates", admission(4, 64));
  add("everything", limit(60, Eviction::kLfu), ttl(20), admission(2, 300), window(2));
  add("other policies by segment", by_segment({60, Eviction::kLru}, {45, Eviction::kLfu}, {}));
  add("other ages by segment", by_segment({0, Eviction::kNone, 3}, {}, {0, Eviction::kNone, 40}));
  add("other decay by segment",
      by_segment({40, Eviction::kLfu, 0, 1, 0, 3}, {45, Eviction::kLfu}, {40, Eviction::kLfu, 0, 1, 0, 100}));
  add("other admissions by segment", by_segment({0, Eviction::kNone, 0, 3, 40}, {}, {50, Eviction::kLru, 5, 2, 20}));
  return cases;
}

int64_t Draw(std::mt19937_64* random) {
  constexpr int64_t kEdges[] = {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), -1, 0};
  if ((*random)() % 16 == 0) return kEdges[(*random)() % 4];
  const int64_t small = static_cast<int64_t>((*random)() % 12 * ((*random)() % 16));  // some often, most seldom
  return (*random)() % 2 ? small : small << 40;
}

Batch DrawBatch(std::mt19937_64* random) {
  Batch batch(1 + (*random)() % 4, std::vector<Ids>(kSegments));
  for (std::vector<Ids>& source : batch) {
    for (Ids& ids : source) {
      for (int64_t n = (*random)() % 4 ? (*random)() % 12 : 0; n > 0; --n) ids.push_back(Draw(random));
    }
  }
  return batch;
}

std::string Name(const Received& key) { return absl::StrCat("segment ", key.segment, ", id ", key.id); }

// Rows in the order received; one handle per distinct row, none (-1) for those without.
void CheckAnswer(const Answer& answer, const Packed& packed, const TableModel& model, const TableSpec& spec) {
  std::map<Received, int32_t> numbers;
  std::map<int64_t, Received> keys;
  for (size_t v = 0; v < packed.received().size(); ++v) {
    const Received& key = packed.received()[v];
    const std::vector<float> wanted = model.Get(key);
    for (int d = 0; d < spec.dim; ++d) CHECK_EQ(answer.rows[v * spec.dim + d], wanted[d], "", Name(key));
    const int32_t number = answer.inverse[v];
    CHECK(number >= 0 && number < static_cast<int64_t>(answer.handles.size()));
    const auto seen = numbers.emplace(key, number);
    CHECK_EQ(seen.first->second, number, "", Name(key));
    const int64_t handle = answer.handles[number];
    CHECK_EQ(handle != kNoRow, model.segment(key.segment).count(key.id) != 0, "", Name(key));
    if (handle == kNoRow) continue;
    const auto owner = keys.emplace(handle, key);
    CHECK_EQ(Name(owner.first->second), Name(key), "one handle for two rows");
  }
  CHECK_EQ(answer.handles.size(), numbers.size());
}

void CheckContents(const HashTable& table, const TableModel& model) {
  for (int64_t s = 0; s < kSegments; ++s) {
    const auto records = Records(table, s);
    CHECK_EQ(records.size(), model.segment(s).size(), "segment ", s);
    for (size_t i = 0; i < records.size(); ++i) {
      const auto& [id, record] = records[i];
      const std::string name = Name({s, id});
      CHECK(i == 0 || records[i - 1].first < id, "an id twice: ", name);
      const auto wanted = model.segment(s).find(id);
      CHECK(wanted != model.segment(s).end(), "", name);
      CHECK_EQ(record.last, wanted->second.last, "", name);
      CHECK_EQ(record.count, wanted->second.count, "", name);
      CHECK(record.numbers == wanted->second.numbers, "", name);
    }
    const SegmentStatistics got = table.Statistics(s), want = model.Statistics(s);
    CHECK_EQ(got.keys, want.keys);
    CHECK_EQ(got.hits, want.hits);
    CHECK_EQ(got.inserts, want.inserts);
    CHECK_EQ(got.evictions, want.evictions);
    CHECK_EQ(got.refused, want.refused);
    CHECK_EQ(got.candidates, want.candidates);
    CHECK(table.Tombstones(s) == model.Tombstones(s), "tombstones of segment ", s);
    Ids ids, counts;
    table.Candidates(s, &ids, &counts);
    std::map<int64_t, int64_t> candidates;
    for (size_t i = 0; i < ids.size(); ++i) candidates[ids[i]] = counts[i];
    CHECK(candidates == model.Candidates(s), "candidates of segment ", s);
  }
  CHECK_EQ(table.clock(), model.clock());
}

void CheckFind(const HashTable& table, const TableModel& model, const Packed& packed, const ParallelFor& parallel_for) {
  const std::vector<float> rows = FindRows(table, packed, parallel_for);
  for (size_t v = 0; v < packed.received().size(); ++v) {
    const std::vector<float> wanted = model.Get(packed.received()[v]);
    for (size_t d = 0; d < wanted.size(); ++d) CHECK_EQ(rows[v * wanted.size() + d], wanted[d], "", Name(packed.received()[v]));
  }
}

int RandomSequence(const TableSpec& spec, int steps, const ParallelFor& parallel_for, std::mt19937_64* random) {
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  TableModel model(spec);
  int exhausted = 0;
  for (int step = 0; step < steps; ++step) {
    const Packed packed(DrawBatch(random));
    const Answer answer = LookUp(table.get(), packed, parallel_for);
    if (model.LookUp(packed)) {
      CHECK_OK(answer.status);
      CheckAnswer(answer, packed, model, spec);
      std::vector<float> grads(packed.received().size() * spec.dim);
      for (float& grad : grads) grad = static_cast<float>(static_cast<int>((*random)() % 2001) - 1000) / 700.0f;
      table->Apply(answer.handles, answer.inverse, grads.data(), Storage::kFloat32, 0.3f, {0.1f, 1}, parallel_for);
      model.Apply(packed, grads, 0.3f, 0.1f);
    } else {
      ++exhausted;
      CHECK(absl::IsResourceExhausted(answer.status), "", answer.status.ToString());
    }
    if ((*random)() % 4 == 0) CheckFind(*table, model, Packed(DrawBatch(random)), parallel_for);
    const int64_t segment = (*random)() % kSegments;
    if ((*random)() % 8 == 0) {
      const Ids ids = {Draw(random), Draw(random), Draw(random), Draw(random)};
      CHECK_EQ(table->Remove(segment, ids), model.Remove(segment, ids));
    }
    if ((*random)() % 16 == 0) {
      const int64_t count = (*random)() % 10;
      CHECK_EQ(table->Evict(segment, count), model.Evict(segment, count));
    }
    if ((*random)() % 64 == 0) {
      table->ForgetTombstones();
      model.ForgetTombstones();
    }
    if (step % 8 == 0 || step + 1 == steps) CheckContents(*table, model);
  }
  return exhausted;
}

}  // namespace
}  // namespace fusedrec

TEST(hash_table) {
  using namespace fusedrec;
  std::mt19937_64 random(6);
  int exhausted = 0;
  for (const Case& test : Cases()) {
    std::fprintf(stderr, "  %s\n", test.name.c_str());
    if (!kRacesAlone) exhausted += RandomSequence(test.spec, 250, SerialFor, &random);
    exhausted += RandomSequence(test.spec, 12, Threads(3), &random);
  }
  CHECK(kRacesAlone || exhausted > 10, "only ", exhausted, " batches met a table that was too small");
}
