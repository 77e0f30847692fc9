// Sizes of send buffers.
//
// Horovod remembers a collective by the shape of the tensor it is given: a new first dimension makes all ranks
// negotiate again. Deduplicated ids change in number every step, so buffers are rounded up to few sizes; the splits
// say how much of a buffer is real, and only that travels. Between two ranks of one quiet machine this saves 10 to 30 %
// of an all2all of 22,000 rows and nothing of a small one (benchmarks/alltoall_padding).
#ifndef FUSEDREC_COMMON_BUCKET_H_
#define FUSEDREC_COMMON_BUCKET_H_

#include <algorithm>
#include <cstdint>

namespace fusedrec {

// Rounds n up to a multiple of 1/4 of the largest power of two <= n, at least kMinBucket: waste < 25 %, and a step
// whose n moves by a few percent mostly stays in its bucket.
inline int64_t BucketedSize(int64_t n) {
  constexpr int64_t kMinBucket = 256;
  int64_t step = kMinBucket;
  while (step * 8 <= n) step *= 2;
  return std::max<int64_t>((n + step - 1) / step, 1) * step;
}

}  // namespace fusedrec

#endif  // FUSEDREC_COMMON_BUCKET_H_
