// Concatenation of ids on a GPU: ids that were made on the device stay there.
//
// Results equal the CPU's, bit for bit. All sizes follow from the shapes of inputs, so no size waits for the device.
// row_splits are on the device, too. A kernel checks them. If some are wrong, no bag is written.
#pragma once

#include <cmath>

#include "common/cuda_api.h"
#include "common/host_device.h"

namespace fusedrec {

enum class Combiner { kSum, kMean, kSqrtn };

// Factor of the sum of a bag of `ids` ids, on the CPU and on a GPU. An empty bag counts as one id.
FUSEDREC_HOST_DEVICE inline float ScaleOfBag(Combiner combiner, int64_t ids) {
  const float n = static_cast<float>(ids > 1 ? ids : 1);
  return combiner == Combiner::kSum ? 1.0f : combiner == Combiner::kMean ? 1.0f / n : 1.0f / ::sqrtf(n);
}

}  // namespace fusedrec

extern "C" {

struct FusedrecFeature {
  const int64_t* ids;         // [num_ids], device
  const int64_t* row_splits;  // [num_splits], device, or null: the feature is not ragged
  int64_t num_ids, num_splits;
  int64_t bag_size;  // 0: the rows are the bags
  int64_t combiner;  // 0 sum, 1 mean, 2 sqrtn
};
}

// features [F], host; num_ids and num_bags are the sums over them; a feature has num_ids / bag_size bags, or num_splits - 1.
// fused [N], bag_splits [G + 1], bag_scale [G]: device, out. wrong: host, out: the first feature whose row_splits do not run
// from 0 to num_ids without decreasing; -1 without. Waits once where a feature is ragged.
FUSEDREC_CUDA_API int fusedrec_fuse_ids(const FusedrecFeature* features, int64_t num_features, int64_t num_ids,
                                        int64_t num_bags, const FusedrecAllocator* memory, int64_t* fused,
                                        int64_t* bag_splits, float* bag_scale, int32_t* wrong, void* stream);
