// A row that one lookup is about to move, because it got hot, stays where it is when another lookup, still running, has
// taken its handle in between: that one's gradients would go to a row that is gone. A row that cools stays, too, while
// gradients wait for it.
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "batches.h"
#include "check.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {
namespace {

// Runs all on one thread, and calls `before` ahead of the `number`-th pass over the shards and `after` behind it. The
// first pass of a lookup finds the rows that are there, the second makes and moves rows.
ParallelFor AroundPass(int number, const std::function<void()>& before, const std::function<void()>& after) {
  auto passes = std::make_shared<int>(0);
  return [=](int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& body) {
    const bool here = total == kShards && ++*passes == number;
    if (here) before();
    SerialFor(total, cost, body);
    if (here) after();
  };
}

constexpr int kDim = 4;

// A table whose new rows hold ones, and become float32 at their second lookup.
TableSpec OnesInMixedStorage() {
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kConstant;
  spec.a = 1.0;
  spec.seeds = {1};
  spec.hot_after = 2;
  return spec;
}

void HeldRowsDoNotMove() {
  constexpr int64_t kWindow = 2;  // two lookups may wait for gradients
  const std::unique_ptr<HashTable> table = MakeTable(OnesInMixedStorage());
  const Packed packed(Batch{{Ids{7}}});
  const std::vector<float> grads(kDim, 1.0f);
  const auto apply = [&](const Answer& answer) {
    CHECK_OK(Apply(table.get(), answer, grads, {0.25f, 1}));
  };

  const Answer first = MustLookUp(table.get(), packed, SerialFor, kWindow);
  // `slow` begins while the row waits for the gradients of `first`: it will not move it.
  std::promise<void> slow_has_begun, slow_may_look, slow_has_looked, slow_may_end;
  Answer slow;
  std::thread other([&] {
    slow = MustLookUp(table.get(), packed, AroundPass(1,
        [&] {
          slow_has_begun.set_value();
          slow_may_look.get_future().wait();
        },
        [&] {
          slow_has_looked.set_value();
          slow_may_end.get_future().wait();
        }), kWindow);
  });
  slow_has_begun.get_future().wait();
  apply(first);
  // `fast` finds nothing that holds the row, and chooses to move it; before it does, `slow` takes the row's handle.
  const Answer fast = MustLookUp(table.get(), packed, AroundPass(2,
      [&] {
        slow_may_look.set_value();
        slow_has_looked.get_future().wait();
      },
      [] {}), kWindow);
  slow_may_end.set_value();
  other.join();

  CHECK_EQ(table->rows_in_pool(0), int64_t{0}, "the row has moved");
  const uint32_t row = first.handles[0];
  CHECK_EQ(static_cast<uint32_t>(slow.handles[0]), row);
  CHECK_EQ(static_cast<uint32_t>(fast.handles[0]), row);
  apply(slow);
  apply(fast);
  CHECK_EQ(FindRows(*table, packed)[0], 1.0f - 3 * 0.25f);
  MustLookUp(table.get(), Packed(Batch{{Ids{8}}}), SerialFor, kWindow);
  MustLookUp(table.get(), packed, SerialFor, kWindow);
  CHECK_EQ(table->rows_in_pool(0), int64_t{1}, "nothing holds the row any more");
}

void RowsWithWaitingGradientsAreNotDemoted() {
  TableSpec spec = OnesInMixedStorage();
  spec.limits.resize(1);
  spec.limits[0].frequency_decay_steps = 1;  // every lookup visits every row
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const Packed packed(Batch{{Ids{7}}}), other(Batch{{Ids{8}}});
  // Halved ahead of each lookup, a count never reaches 2: the row comes hot from a checkpoint.
  MustLookUp(table.get(), packed);
  std::vector<int64_t> handles;
  Ids ids;
  CHECK_OK(table->Keys({SerialFor}, 0, {}, &ids, &handles));
  std::vector<char> record(table->record_bytes());
  CHECK_OK(table->ReadRecords({SerialFor}, handles, record.data()));
  const uint32_t count = 64, pool = 0;
  std::memcpy(&record[4], &count, 4);
  std::memcpy(&record[12], &pool, 4);
  CHECK_OK(table->Import({SerialFor}, 0, ids, record.data()));

  const Answer held = MustLookUp(table.get(), packed);
  const std::vector<float> grads(kDim, 1.0f);
  CHECK_OK(Accumulate(table.get(), held, grads));
  for (int lookup = 0; lookup < 10; ++lookup) MustLookUp(table.get(), other);
  CHECK_EQ(table->rows_in_pool(0), int64_t{1}, "the row has been demoted");
  CHECK(!table->IsStale(held.clock));
  CHECK_OK(table->ApplyAccumulated({SerialFor}, {0.25f, 1}));
  CHECK_EQ(FindRows(*table, packed)[0], 0.75f);
  MustLookUp(table.get(), other);
  CHECK_EQ(table->rows_in_pool(0), int64_t{0}, "nothing holds the row any more");
  CHECK_EQ(FindRows(*table, packed)[0], 0.75f);
  CHECK(table->IsStale(held.clock), "handles of rows that have moved");
}

}  // namespace
}  // namespace fusedrec

TEST(handles_held) {
  fusedrec::HeldRowsDoNotMove();
  fusedrec::RowsWithWaitingGradientsAreNotDemoted();
}
