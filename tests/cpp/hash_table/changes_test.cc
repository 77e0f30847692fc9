// The rows that changed since a full save, from the record of what was touched, are those that all headers tell: of a
// twin without a record. Gradients that come late, rows that leave, come back or are imported, and records that grow too
// long included.
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kDim = 3;
constexpr size_t kVersions = 8;  // that a check compares: the first of a record, and the newest

std::unique_ptr<HashTable> Make(bool record, Eviction eviction, int64_t hot_after, int64_t decay) {
  TableSpec spec;
  spec.dim = kDim;
  spec.seeds = {3, 4};
  spec.distribution = Distribution::kNormal;
  spec.b = 1.0;
  spec.record_tombstones = record;
  spec.hot_after = hot_after;
  const int64_t max_rows = eviction != Eviction::kNone ? 200 : 0;
  spec.limits.assign(spec.seeds.size(), {max_rows, eviction});
  for (Limits& limits : spec.limits) limits.frequency_decay_steps = decay;
  return MakeTable(spec);
}

std::set<int64_t> Changed(HashTable& table, int64_t segment, Moment since,
                          const ParallelFor& parallel_for = SerialFor) {
  Ids ids;
  std::vector<int64_t> handles;
  CHECK_OK(table.Keys({parallel_for}, segment, since, &ids, &handles));
  const std::set<int64_t> distinct(ids.begin(), ids.end());
  CHECK_EQ(distinct.size(), ids.size(), "an id twice");
  CHECK_EQ(handles.size(), ids.size());
  return distinct;
}

// The same is done to both tables.
class Twins {
 public:
  Twins(Eviction eviction, int64_t hot_after, int64_t decay = 0)
      : tables_{Make(true, eviction, hot_after, decay), Make(false, eviction, hot_after, decay)} {}

  template <typename Body>
  void Both(const Body& body) {
    for (auto& table : tables_) body(table.get());
  }
  void BeginRecord() {
    Both([](HashTable* table) { table->ForgetTombstones(); });
    since_ = {since_.back(), Now()};  // a moment of before the record, too
  }
  void Check() {
    since_.push_back(Now());
    if (since_.size() > kVersions) since_.erase(since_.begin() + 1);
    CHECK_EQ(tables_[0]->version(), tables_[1]->version());
    for (const Moment since : since_) {
      for (int64_t segment = 0; segment < 2; ++segment) {
        CHECK(Changed(*tables_[0], segment, since) == Changed(*tables_[1], segment, since), "since ", since.version);
      }
    }
  }
  HashTable& twin() const { return *tables_[1]; }

 private:
  Moment Now() const { return {tables_[0]->clock(), tables_[0]->version()}; }

  std::unique_ptr<HashTable> tables_[2];
  std::vector<Moment> since_ = {{}};
};

void RandomSteps(Eviction eviction, int64_t hot_after, uint64_t seed, int64_t decay = 0) {
  std::mt19937_64 random(seed);
  Twins twins(eviction, hot_after, decay);
  struct Late {
    Answer answer[2];
    size_t received;
  };
  std::vector<Late> late;
  for (int step = 0; step < 200; ++step) {
    Batch batch(2, std::vector<Ids>(2));
    for (auto& source : batch) {
      for (Ids& ids : source) {
        for (int n = random() % 8; n > 0; --n) ids.push_back(static_cast<int64_t>(random() % 150) - 30);
      }
    }
    const Packed packed(batch);
    const std::vector<float> grads(packed.received().size() * kDim, 0.5f);
    Late now{{}, packed.received().size()};
    const int how = random() % 8;
    int which = 0;
    twins.Both([&](HashTable* table) {
      Answer& answer = now.answer[which++] = MustLookUp(table, packed);
      if (how < 4) {
        CHECK_OK(Apply(table, answer, grads, {0.1f, 1}));
      } else if (how == 4) {
        CHECK_OK(Accumulate(table, answer, grads));
      }
    });
    if (how == 5 && eviction == Eviction::kNone && hot_after == 0) late.push_back(now);
    if (random() % 8 == 0 && !late.empty()) {
      const std::vector<float> theirs(late.back().received * kDim, 0.25f);
      which = 0;
      twins.Both([&](HashTable* table) {
        Apply(table, late.back().answer[which++], theirs, {0.1f, 1}).IgnoreError();  // an import may have ended them
      });
      late.pop_back();
    }
    const Ids some = {static_cast<int64_t>(random() % 150) - 30, static_cast<int64_t>(random() % 150) + 1000};
    const uint64_t dice = random();
    std::vector<char> records(some.size() * twins.twin().record_bytes());
    const uint32_t changed = twins.twin().version() + 1;
    for (size_t i = 0; i < some.size(); ++i) {
      std::memcpy(&records[i * twins.twin().record_bytes() + 8], &changed, sizeof(changed));
    }
    twins.Both([&](HashTable* table) {
      if (dice % 4 == 0) CHECK_OK(table->ApplyAccumulated({SerialFor}, {0.1f, 1}));
      int64_t removed;  // none while gradients wait
      if (dice % 16 == 1 && late.empty()) table->Remove({SerialFor}, 0, some, &removed).IgnoreError();
      if (dice % 16 == 2) {
        CHECK_OK(table->Import({SerialFor}, 1, some, records.data()));
        Evict(table, 1, 0);  // the version is now that of these rows
      }
      if (dice % 64 == 3 && late.empty()) CHECK_OK(table->Clear({SerialFor}));
    });
    if (random() % 32 == 0) twins.BeginRecord();
    twins.Check();
  }
}

// When many rows are touched, the log ends, because a scan is no slower. The answer stays the same.
void MoreThanIsRecorded() {
  Twins twins(Eviction::kNone, 0);
  twins.Both([&](HashTable* table) { MustLookUp(table, Packed(Batch{{Ids{1}, Ids{}}})); });
  twins.BeginRecord();
  Batch batch(1, std::vector<Ids>(2));
  for (int64_t id = 0; id < 40000; ++id) batch[0][0].push_back(id);
  const Packed packed(batch);
  twins.Both([&](HashTable* table) { MustLookUp(table, packed); });
  twins.Check();
  const Moment since{twins.twin().clock(), twins.twin().version()};
  twins.BeginRecord();
  twins.Both([&](HashTable* table) { MustLookUp(table, packed); });
  twins.Check();
  CHECK(Changed(twins.twin(), 0, since, Threads(2)) == Changed(twins.twin(), 0, since));
}

}  // namespace
}  // namespace fusedrec

TEST(changes) {
  using namespace fusedrec;
  for (uint64_t seed = 0; seed < 3 && !kRacesAlone; ++seed) {
    RandomSteps(Eviction::kNone, 0, seed);
    RandomSteps(Eviction::kLru, 0, seed);
    RandomSteps(Eviction::kNone, 3, seed);
    RandomSteps(Eviction::kNone, 3, seed, 7);
  }
  MoreThanIsRecorded();
}
