// Several threads on one table: training lookups that insert while keys grow, rows leave or change pools; inference
// lookups of rows that exist, which must always find them, with their value; statistics and checkpoints beside it.
// ThreadSanitizer watches; without it the values are checked all the same.
#include <pthread.h>

#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "batches.h"
#include "check.h"
#include "folder.h"
#include "hash_table/cpu/hash_table.h"
#include "threads.h"

namespace fusedrec {
namespace {

constexpr int kDim = 8;
constexpr int64_t kSteady = 300;  // ids 0 to 299 of both segments exist and keep their values
constexpr int64_t kGrowths = 12;  // batches of 500 new ids, of each of two threads

TableSpec Spec() {
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kUniform;
  spec.a = -1.0;
  spec.b = 1.0;
  spec.seeds = {31, 32};
  return spec;
}

Ids Range(int64_t begin, int64_t count) {
  Ids ids;
  for (int64_t id = begin; id < begin + count; ++id) ids.push_back(id);
  return ids;
}

Packed Steady() { return Packed(Batch{{Range(0, kSteady), Range(0, kSteady)}}); }

// A batch of training: row minus one half, so that values differ from the initial ones.
void Train(HashTable* table, const Packed& packed, const ParallelFor& parallel_for) {
  const std::vector<float> grads(packed.received().size() * kDim, 1.0f);
  // A removal by another thread ends handles, and the batch is looked up again.
  for (int tries = 0;; ++tries) {
    const absl::Status done = Apply(table, MustLookUp(table, packed, parallel_for), grads, {0.5f, 1}, parallel_for);
    if (done.ok()) return;
    CHECK(absl::IsFailedPrecondition(done) && tries < 1000, "update: ", done.message());
  }
}

// Two threads that wait for each other at every step: a lookup that fell far behind would take all rows of the other
// thread's for recent ones, and find no room.
class InStep {
 public:
  InStep() { pthread_barrier_init(&barrier_, nullptr, 2); }
  ~InStep() { pthread_barrier_destroy(&barrier_); }
  void Wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// Runs `body` on each of the functions' own thread until the first `foreground` of them are through.
void Together(const std::vector<std::function<void()>>& foreground, const std::vector<std::function<void()>>& background) {
  std::atomic<bool> done{false};
  std::vector<std::thread> front, back;
  for (const auto& body : background) {
    back.emplace_back([&] {
      do {
        body();
      } while (!done);
    });
  }
  for (const auto& body : foreground) front.emplace_back(body);
  for (std::thread& thread : front) thread.join();
  done = true;
  for (std::thread& thread : back) thread.join();
}

// Finds the steady rows again and again, from both segments.
std::function<void()> Finder(HashTable& table, const std::vector<float>& wanted) {
  return [&table, wanted, packed = Steady()] {
    for (int repeat = 0; repeat < 3; ++repeat) CHECK(FindRows(table, packed, Threads(2)) == wanted);
  };
}

void GrowthAndRemoval() {
  const std::unique_ptr<HashTable> table = MakeTable(Spec());
  Train(table.get(), Steady(), SerialFor);
  const std::vector<float> wanted = FindRows(*table, Steady());
  const auto steady_records = Records(*table, 1);
  const auto grow = [&](int64_t begin) {
    return [&table, begin] {
      for (int64_t n = 0; n < kGrowths; ++n) {
        Train(table.get(), Packed(Batch{{Range(begin + 500 * n, 500), {}}, {Range(begin + 500 * n, 50), {}}}), Threads(2));
      }
    };
  };
  // These are never trained, so whoever looks for one finds its initial row, be it there or not, at any moment.
  const auto come_and_go = [&] {
    for (int64_t n = 0; n < 18; ++n) {
      const Ids ids = Range(-1000 * (n % 3 + 1), 400);
      MustLookUp(table.get(), Packed(Batch{{ids, {}}}));
      CHECK_EQ(Remove(table.get(), 0, ids), 400);
    }
  };
  const Packed fickle(Batch{{Range(-3000, 3000), {}}});
  const auto look_for_them = [&, initial = FindRows(*table, fickle)] { CHECK(FindRows(*table, fickle) == initial); };
  const auto watch = [&] {
    const SegmentStatistics statistics = table->StatisticsOf(0);
    CHECK(statistics.keys >= kSteady && statistics.keys <= 1000 * (kGrowths + 1), "keys ", statistics.keys);
    CHECK_EQ(table->size(1), kSteady);
    CHECK(table->key_bytes() > 0 && table->row_bytes(0) > 0);
    const auto records = Records(*table, 1, Threads(2));  // of a segment that is not being trained
    CHECK_EQ(records.size(), steady_records.size());
    for (size_t i = 0; i < records.size(); ++i) CHECK(records[i].second.numbers == steady_records[i].second.numbers);
  };
  Together({grow(1'000'000), grow(2'000'000), come_and_go}, {Finder(*table, wanted), look_for_them, watch});
  CHECK_EQ(table->size(0), kSteady + 1000 * kGrowths);
  const std::vector<float> rows = FindRows(*table, Packed(Batch{{Range(1'000'000, 500 * kGrowths), {}}}));
  const std::vector<float> initial = FindRows(*MakeTable(Spec()), Packed(Batch{{Range(1'000'000, 500 * kGrowths), {}}}));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t of_batch = static_cast<int64_t>(i) / kDim % 500;  // the first 50 came from two sources
    CHECK_EQ(rows[i], initial[i] - 0.5f * (of_batch < 50 ? 2.0f : 1.0f), "number ", i);
  }
}

// Checkpoints read keys and records of the very segment that grows; nothing is updated meanwhile.
void SnapshotsOfWhatGrows() {
  const std::unique_ptr<HashTable> table = MakeTable(Spec());
  Train(table.get(), Steady(), SerialFor);
  const std::vector<float> wanted = FindRows(*table, Steady());
  const auto grow = [&] {
    for (int64_t n = 0; n < kGrowths; ++n) MustLookUp(table.get(), Packed(Batch{{Range(1'000'000 + 300 * n, 300), {}}}));
  };
  const auto read = [&] {
    Ids ids;
    std::vector<int64_t> handles;
    CHECK_OK(table->Keys({SerialFor}, 0, {}, &ids, &handles));
    CHECK(static_cast<int64_t>(ids.size()) >= kSteady);
    std::vector<int64_t> steady;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < kSteady) steady.push_back(handles[i]);
    }
    CHECK_EQ(static_cast<int64_t>(steady.size()), kSteady);
    std::vector<char> records(steady.size() * table->record_bytes());
    CHECK_OK(table->ReadRecords({SerialFor}, steady, records.data()));
  };
  Together({grow}, {Finder(*table, wanted), read});
}

// Every batch brings the steady rows too, so they stay while everything else leaves, or goes down to the second pool.
void RowsThatStay(TableSpec spec) {
  InStep step;
  constexpr int64_t kWindow = 4;
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  MustLookUp(table.get(), Steady(), SerialFor, kWindow);
  const std::vector<float> wanted = FindRows(*table, Steady());
  const auto grow = [&](int64_t begin) {
    return [&, begin] {
      std::mt19937_64 random(begin);
      for (int64_t n = 0; n < 25; ++n) {
        step.Wait();
        const Ids ids = Range(begin + static_cast<int64_t>(random() % 8) * 100, 100);
        MustLookUp(table.get(), Packed(Batch{{ids, {}}, {Range(0, kSteady), Range(0, kSteady)}}), Threads(2), kWindow);
      }
    };
  };
  Together({grow(10'000), grow(20'000)}, {Finder(*table, wanted), Finder(*table, wanted)});
}

// Rows that are found whatever pool they are in: nothing keeps the steady ones in memory.
void RowsThatMove(TableSpec spec) {
  InStep step;
  constexpr int64_t kWindow = 3;
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const std::vector<float> wanted = MustLookUp(table.get(), Steady(), SerialFor, kWindow).rows;
  const auto wander = [&](uint64_t seed) {
    return [&, seed] {
      std::mt19937_64 random(seed);
      for (int64_t n = 0; n < 60; ++n) {
        step.Wait();
        Batch batch(1, std::vector<Ids>(2));
        for (Ids& ids : batch[0]) {
          for (int i = 0; i < 40; ++i) ids.push_back(static_cast<int64_t>(random() % (3 * kSteady)));
        }
        MustLookUp(table.get(), Packed(batch), Threads(2), kWindow);
      }
    };
  };
  Together({wander(1), wander(2)}, {Finder(*table, wanted), Finder(*table, wanted)});
}

// Two lookups at a time, each of ids of its own. Rows of a lookup must not leave, or move, before it has updated them,
// although the other one is looking for the oldest rows at that moment: with window = 2 they are never old enough.
void UpdatesAreNotLost(TableSpec spec) {
  InStep step;
  constexpr int64_t kWindow = 2;
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const auto train = [&](int64_t parity) {
    return [&, parity] {
      std::mt19937_64 random(parity);
      for (int n = 0; n < 60; ++n) {
        Batch batch(1, std::vector<Ids>(2));
        for (int i = 0; i < 50; ++i) batch[0][0].push_back(static_cast<int64_t>(random() % 600) * 2 + parity);
        const Packed packed(batch);
        step.Wait();
        const Answer answer = MustLookUp(table.get(), packed, SerialFor, kWindow);
        const std::vector<float> grads(packed.received().size() * kDim, 1.0f);
        CHECK_OK(Apply(table.get(), answer, grads, {0.5f, 1}));
        std::vector<float> times(answer.handles.size());
        for (const int32_t number : answer.inverse) ++times[number];
        step.Wait();
        const std::vector<float> after = FindRows(*table, packed);
        for (size_t v = 0; v < answer.inverse.size(); ++v) {
          const float wanted = answer.rows[v * kDim] - 0.5f * times[answer.inverse[v]];
          CHECK_EQ(after[v * kDim], wanted, "id ", packed.received()[v].id, ", round ", n);
        }
      }
    };
  };
  Together({train(0), train(1)}, {});
}

}  // namespace
}  // namespace fusedrec

TEST(threads) {
  using namespace fusedrec;
  const Folder folder;
  const auto lru = [](int64_t max_rows) {
    TableSpec spec = Spec();
    spec.limits.assign(spec.seeds.size(), {max_rows, Eviction::kLru});
    return spec;
  };
  const auto tiered = [&](int64_t rows_in_memory) {
    TableSpec spec = Spec();
    spec.memory_budget = rows_in_memory * RowFormat(Storage::kFloat32, kDim, 0, 0, false).stride();
    spec.tier_folder = folder.name();
    return spec;
  };
  TableSpec mixed = Spec();
  mixed.hot_after = 5;
  mixed.distribution = Distribution::kConstant;  // the same in 16 bits
  mixed.a = 0.25;
  TableSpec cooling = mixed;
  cooling.hot_after = 2;
  cooling.limits.resize(cooling.seeds.size());
  for (Limits& limits : cooling.limits) limits.frequency_decay_steps = 16;
  GrowthAndRemoval();
  SnapshotsOfWhatGrows();
  for (const TableSpec& spec : {lru(1000), tiered(1400)}) RowsThatStay(spec);
  for (const TableSpec& spec : {tiered(900), mixed, cooling}) RowsThatMove(spec);
  for (const TableSpec& spec : {lru(400), tiered(400), cooling}) UpdatesAreNotLost(spec);
}
