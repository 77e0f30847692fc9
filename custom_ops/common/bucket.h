// Sizes of send buffers.
//
// The number of deduplicated ids changes every step. Buffers are rounded up to few sizes, so that memory is used again.
// Buffers of exact sizes take fresh pages from the system. Also, Horovod as released (without tools/horovod.patch)
// negotiates again for a new first dimension. The splits tell how much of a buffer is data, and only the data travels.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedrec {

// Rounds n up to a multiple of 1/4 of the largest power of two <= n, at least kMinBucket. The waste is below 25 %. A
// step whose n moves by a few percent mostly stays in its bucket.
inline int64_t BucketedSize(int64_t n) {
  constexpr int64_t kMinBucket = 256;
  int64_t step = kMinBucket;
  while (step * 8 <= n) step *= 2;
  return std::max<int64_t>((n + step - 1) / step, 1) * step;
}

}  // namespace fusedrec
