// Gradients of the weights of the bias by position and by buckets of time.
#pragma once

#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/attention_shared.cuh"

namespace fusedrec::attention {

// Gradients of the bias: of the pairs of one tile, `exact` and `buckets`, keys in rows and queries in columns.
template <typename T, int D>
class BiasGradSums {
 public:
  using S = Shape<T, D>;

  __device__ BiasGradSums(const Problem<T>& problem, const BiasTiles<T, D>& tiles) : problem_(problem), tiles_(tiles) {}

  // Sums of the time part become 0. All threads call it, and meet at a barrier before the next call.
  __device__ void Begin() {
    const int size = HasBuckets(problem_.bias) ? problem_.bias.num_thresholds + 1 : 0;
    for (int g = threadIdx.x; g < S::kTimeWarps * size; g += S::kThreads) {
      tiles_.time_sums[g] = 0.0f;
    }
  }

  // Adds to the weights of the distances: thread q owns the pairs whose places differ by low + q.
  __device__ void AddDistances(const RowMask& mask, int r0, int r1, int c0, int c1) {
    const int low = LowestDistance(mask, c1, r0), count = mask.Place(r1 - 1) - mask.Place(c0) - low + 1;
    float* const sums = problem_.position_slots + static_cast<int64_t>(blockIdx.x) * (2 * problem_.bias.max_length - 1);
    for (int q = threadIdx.x; q < count; q += S::kThreads) {
      float sum = 0.0f;
      for (int r = 0; r < r1 - r0; ++r) {
        const int place = mask.Place(r0 + r) - (low + q);  // of the query
        // One token has each place, except the place of the targets.
        const int from = Greater(place, c0), to = place < mask.targets_from ? Lesser(place + 1, c1) : c1;
        if (place > mask.targets_from) continue;
        for (int c = from; c < to; ++c) sum += tiles_.exact[r * S::kExactStride + c - c0];
      }
      sums[problem_.bias.max_length - 1 + low + q] += sum;
    }
  }

  __device__ void AddBuckets() {
    if (!HasBuckets(problem_.bias) || static_cast<int>(threadIdx.x) >= S::kRows) return;
    for (int c = 0; c < S::kColumns; ++c) {
      const int bucket = tiles_.buckets[threadIdx.x * S::kExactStride + c];
      const bool changes = bucket != kNoBucket && bucket != bucket_;
      Flush(changes);
      if (changes) {
        bucket_ = bucket;
        sum_ = 0.0f;
      }
      sum_ += tiles_.exact[threadIdx.x * S::kExactStride + c];
    }
  }

  // Comes after the last tile of a row of tiles.
  __device__ void EndRows() {
    if (!HasBuckets(problem_.bias) || static_cast<int>(threadIdx.x) >= S::kRows) return;
    Flush(bucket_ != kNoBucket);
    bucket_ = kNoBucket;
    sum_ = 0.0f;
  }

  __device__ void Write() {
    __syncthreads();
    const int size = problem_.bias.num_thresholds + 1;
    for (int g = threadIdx.x; g < size; g += S::kThreads) {
      float sum = 0.0f;
      for (int w = 0; w < S::kTimeWarps; ++w) sum += tiles_.time_sums[w * size + g];
      problem_.time_slots[static_cast<int64_t>(blockIdx.x) * size + g] = sum;
    }
  }

 private:
  // Adds the sums of the chosen lanes to their buckets, one lane after the other, because lanes may share a bucket.
  __device__ void Flush(bool wanted) {
    float* const sums = tiles_.time_sums + Warp() * (problem_.bias.num_thresholds + 1);
    for (unsigned waiting = __ballot_sync(kFullWarp, wanted && bucket_ != kNoBucket); waiting != 0;
         waiting &= waiting - 1) {
      if (Lane() == __ffs(static_cast<int>(waiting)) - 1) sums[bucket_] += sum_;
      __syncwarp();
    }
  }

  const Problem<T>& problem_;
  const BiasTiles<T, D>& tiles_;
  int bucket_ = kNoBucket;
  float sum_ = 0.0f;
};

}  // namespace fusedrec::attention
