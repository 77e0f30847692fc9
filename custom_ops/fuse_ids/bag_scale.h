// The scale of a bag, on the CPU and on a GPU, bit for bit.
#pragma once

#include <cstdint>
#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

#include "common/host_device.h"

namespace fusedrec {

enum class Combiner { kSum, kMean, kSqrtn };

// Factor of the sum of a bag of `ids` ids. An empty bag counts as one id.
FUSEDREC_HOST_DEVICE inline float ScaleOfBag(Combiner combiner, int64_t ids) {
  const float n = static_cast<float>(ids > 1 ? ids : 1);
  return combiner == Combiner::kSum ? 1.0f : combiner == Combiner::kMean ? 1.0f / n : 1.0f / ::sqrtf(n);
}

}  // namespace fusedrec
