// What the CPU and the GPU share: bounds of sizes (limits.h has the checks), and functions with the same bits.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDREC_HOST_DEVICE __host__ __device__
#else
#define FUSEDREC_HOST_DEVICE
#endif

namespace fusedrec {

constexpr int64_t kMostPositions = (int64_t{1} << 31) - 1;  // ids, rows and entries that an int32 can name
constexpr int64_t kMostSegments = int64_t{1} << 20;         // tables of a group
constexpr int64_t kMostRanks = int64_t{1} << 16;
constexpr int64_t kMostColumns = int64_t{1} << 20;          // of a row
constexpr int64_t kMostCount = int64_t{1} << 48;            // of the counts of a table: rows, bytes, lookups
constexpr int64_t kMostVersion = (int64_t{1} << 32) - 1;    // of a table; table_limits.h has that of its clock

// The last i in [low, high] with begin(i) <= n, where begin does not decrease and begin(low) <= n.
template <typename Begin, typename Number>
FUSEDREC_HOST_DEVICE inline Number LastBegun(const Begin& begin, Number low, Number high, Number n) {
  while (low < high) {
    const Number middle = (low + high + 1) / 2;
    if (begin(middle) <= n) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace fusedrec
