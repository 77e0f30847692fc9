// The interface through which an algorithm runs on the threads of its caller.
//
// OpKernels pass TensorFlow's own pool (CpuPool in kernel_util.h). A C++ test passes SerialFor.
#pragma once

#include <cstdint>
#include <functional>

namespace fusedrec {

// Calls body(begin, end) so that the ranges cover [0, total) once; returns when all have run. `unit_cost` is the
// rough number of CPU cycles of one unit: pools use it to choose the size of the ranges.
using ParallelFor =
    std::function<void(int64_t total, int64_t unit_cost, const std::function<void(int64_t, int64_t)>& body)>;

inline void SerialFor(int64_t total, int64_t /*unit_cost*/, const std::function<void(int64_t, int64_t)>& body) {
  if (total > 0) body(0, total);
}

}  // namespace fusedrec
