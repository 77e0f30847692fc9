// Interfaces of TensorFlow that differ between the releases that this package is built for: the only place that knows.
//
// A template asks whether the newer interface exists. A number of a release would not say so for a nightly build.
#pragma once

#include <cstdint>

namespace fusedrec {

// Returns the second argument of ThreadPool::ParallelFor: SchedulingParams::Adaptive, or the cost where it is not there.
// Newer releases deprecate the cost. Call with 0 as `newest`, which prefers the first overload.
template <typename Pool>
auto BlocksByCost(int64_t unit_cost, int /*newest*/) -> decltype(Pool::SchedulingParams::Adaptive(unit_cost)) {
  return Pool::SchedulingParams::Adaptive(unit_cost);
}
template <typename Pool>
int64_t BlocksByCost(int64_t unit_cost, ...) {
  return unit_cost;
}

}  // namespace fusedrec
