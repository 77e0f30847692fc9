// Records: a table that is read out and written into an empty one goes on as if nothing had happened, bit by bit, in
// every storage and with two pools; a delta holds what changed and nothing else.
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kDim = 5;  // odd: 16-bit rows and slots end between two float32

TableSpec Spec(Storage storage, bool stochastic, int64_t hot_after) {
  TableSpec spec;
  spec.dim = kDim;
  spec.storage = storage;
  spec.stochastic_rounding = stochastic;
  spec.hot_after = hot_after;
  spec.distribution = Distribution::kNormal;
  spec.b = 1.0;
  spec.seeds = {21};
  return spec;
}

struct Snapshot {
  Ids ids;
  std::string bytes;
};

Snapshot Read(const HashTable& table, Moment since = {}) {
  Snapshot snapshot;
  std::vector<int64_t> handles;
  table.Keys(0, since, Threads(2), &snapshot.ids, &handles);
  snapshot.bytes.resize(handles.size() * table.records().bytes());
  table.records().Read(handles, Threads(2), snapshot.bytes.data());
  return snapshot;
}

std::map<int64_t, std::string> ById(const HashTable& table) {
  const Snapshot snapshot = Read(table);
  std::map<int64_t, std::string> records;
  const size_t size = table.records().bytes();
  for (size_t i = 0; i < snapshot.ids.size(); ++i) records[snapshot.ids[i]] = snapshot.bytes.substr(i * size, size);
  CHECK_EQ(records.size(), snapshot.ids.size());
  return records;
}

void CheckSame(const HashTable& got, const HashTable& wanted) {
  const std::map<int64_t, std::string> ours = ById(got), theirs = ById(wanted);
  CHECK(ours == theirs);
  CHECK_EQ(got.clock(), wanted.clock());
}

Batch Draw(std::mt19937_64* random) {
  Batch batch(2, std::vector<Ids>(1));
  for (std::vector<Ids>& source : batch) {
    for (int n = 0; n < 40; ++n) source[0].push_back((*random)() % 8 * ((*random)() % 30) - 20);
  }
  return batch;
}

void TrainStep(HashTable* table, int64_t step, std::mt19937_64 random) {
  const Packed packed(Draw(&random));
  const Answer answer = MustLookUp(table, packed);
  std::normal_distribution<float> normal;
  std::vector<float> grads(packed.received().size() * kDim);
  for (float& grad : grads) grad = normal(random);
  table->Apply(answer.handles, answer.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.1f, step}, SerialFor);
}

struct RuleCase {
  std::string name;
  std::vector<float> hyperparameters;
};

void GoesOn(const TableSpec& spec, const RuleCase& rule) {
  const std::unique_ptr<HashTable> table = MakeTable(spec, rule.name, rule.hyperparameters);
  int64_t step = 10;
  for (int64_t first = 1; first <= step; ++first) TrainStep(table.get(), first, std::mt19937_64(first));
  for (const bool clock_is_set : {true, false}) {
    const std::unique_ptr<HashTable> second = MakeTable(spec, rule.name, rule.hyperparameters);
    // Something that the records overwrite, wherever it lies.
    CHECK_EQ(second->records().bytes(), table->records().bytes());
    if (clock_is_set) TrainStep(second.get(), 1, std::mt19937_64(1));
    const Snapshot snapshot = Read(*table);
    CHECK_OK(second->records().Write(0, snapshot.ids, snapshot.bytes.data(), Threads(3)));
    if (clock_is_set) second->SetClock(table->clock(), table->version());
    // Without SetClock the records alone bring the clock to the last lookup, or else the next one would take rows of
    // that lookup for its own.
    CheckSame(*second, *table);
    if (!clock_is_set) second->SetClock(second->clock(), table->version());
    for (int64_t more = step + 1; more <= step + 5; ++more) {
      TrainStep(table.get(), more, std::mt19937_64(more));
      TrainStep(second.get(), more, std::mt19937_64(more));
    }
    step += 5;
    CheckSame(*second, *table);
  }
}

// A delta holds only the rows that a step changed, made or touched. A touched row is younger for LRU and ttl.
void DeltaHoldsWhatChanged() {
  const std::unique_ptr<HashTable> table = MakeTable(Spec(Storage::kFloat32, false, 0));
  const auto train = [&](const Ids& ids) {
    const Answer answer = MustLookUp(table.get(), Packed(Batch{{ids}}));
    const std::vector<float> grads(ids.size() * kDim, 1.0f);
    table->Apply(answer.handles, answer.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.1f, 1}, SerialFor);
  };
  const auto changed = [&](Moment since) {
    const Snapshot snapshot = Read(*table, since);
    return std::set<int64_t>(snapshot.ids.begin(), snapshot.ids.end());
  };
  train({1, 2, 3, 4, 5});
  const Moment full{table->clock(), table->version()};
  CHECK(changed(full).empty());
  train({2, 4});
  MustLookUp(table.get(), Packed(Batch{{Ids{5, 6}}}));
  CHECK((changed(full) == std::set<int64_t>{2, 4, 5, 6}));
  const Moment delta{table->clock(), table->version()};
  train({1});
  CHECK((changed(delta) == std::set<int64_t>{1}));
  CHECK((changed(full) == std::set<int64_t>{1, 2, 4, 5, 6}));
  CHECK_EQ(changed({}).size(), 6u);
}

}  // namespace
}  // namespace fusedrec

TEST(records) {
  using namespace fusedrec;
  const std::vector<RuleCase> rules = {{"sgd", {0.0f}},
                                   {"adagrad", {0.0f, 0.1f, 1e-7f, 0.0f, 0.0f}},
                                   {"rowwise_adagrad", {0.0f, 0.1f, 1e-8f, 0.0f, 0.0f, 1.0f}}};
  for (const RuleCase& rule : rules) {
    for (const bool stochastic : {false, true}) {
      for (const Storage storage : {Storage::kFloat32, Storage::kBfloat16, Storage::kFloat16}) {
        GoesOn(Spec(storage, stochastic, 0), rule);
      }
      GoesOn(Spec(Storage::kFloat32, stochastic, 4), rule);
    }
  }
  // All rows cold: their records alone must bring the clock along.
  GoesOn(Spec(Storage::kFloat32, false, 1000), rules[0]);
  DeltaHoldsWhatChanged();
}
