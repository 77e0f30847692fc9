// A ParallelFor of real threads.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "common/parallel.h"

namespace fusedrec {

// ThreadSanitizer makes programs ten times slower and looks for races alone: tests leave out what has no threads.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kRacesAlone = true;
#else
inline constexpr bool kRacesAlone = false;
#endif

// `threads` ranges of almost equal length, each on a thread of its own, whatever the cost: tests want the threads.
inline ParallelFor Threads(int threads) {
  return [threads](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      const int64_t begin = total * t / threads, end = total * (t + 1) / threads;
      if (begin < end) running.emplace_back(body, begin, end);
    }
    for (std::thread& thread : running) thread.join();
  };
}

}  // namespace fusedrec
