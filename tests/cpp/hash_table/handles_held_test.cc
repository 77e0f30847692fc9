// A row that one lookup is about to move, because it got hot, stays where it is when another lookup, still running, has
// taken its handle in between: that one's gradients would go to a row that is gone.
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
    const bool here = total == ShardedRows::kShards && ++*passes == number;
    if (here) before();
    SerialFor(total, cost, body);
    if (here) after();
  };
}

void HeldRowsDoNotMove() {
  constexpr int kDim = 4;
  TableSpec spec;
  spec.dim = kDim;
  spec.distribution = Distribution::kConstant;
  spec.a = 1.0;
  spec.seeds = {1};
  spec.hot_after = 2;
  spec.window = 2;  // two lookups may wait for gradients
  const std::unique_ptr<HashTable> table = MakeTable(spec);
  const Packed packed(Batch{{Ids{7}}});
  const std::vector<float> grads(kDim, 1.0f);
  const auto apply = [&](const Answer& answer) {
    table->Apply(answer.handles, answer.inverse, grads.data(), Storage::kFloat32, 1.0f, {0.25f, 1}, SerialFor,
                 answer.clock);
  };

  const Answer first = MustLookUp(table.get(), packed);
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
        }));
  });
  slow_has_begun.get_future().wait();
  apply(first);
  // `fast` finds nothing that holds the row, and chooses to move it; before it does, `slow` takes the row's handle.
  const Answer fast = MustLookUp(table.get(), packed, AroundPass(2,
      [&] {
        slow_may_look.set_value();
        slow_has_looked.get_future().wait();
      },
      [] {}));
  slow_may_end.set_value();
  other.join();

  CHECK_EQ(table->rows_in_pool(0), int64_t{0}, "the row has moved");
  CHECK_EQ(slow.handles[0], first.handles[0]);
  CHECK_EQ(fast.handles[0], first.handles[0]);
  apply(slow);
  apply(fast);
  CHECK_EQ(FindRows(*table, packed)[0], 1.0f - 3 * 0.25f);
  MustLookUp(table.get(), Packed(Batch{{Ids{8}}}));
  MustLookUp(table.get(), packed);
  CHECK_EQ(table->rows_in_pool(0), int64_t{1}, "nothing holds the row any more");
}

}  // namespace
}  // namespace fusedrec

int main() { fusedrec::HeldRowsDoNotMove(); }
