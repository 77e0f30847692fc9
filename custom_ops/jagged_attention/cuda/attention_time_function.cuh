// Functions of time in place of buckets (FuXi-beta, -gamma), and the gradients of their parameters.
//
// The functions and their derivatives equal engine_bias.inc.h's. They take the seconds between answer and ask, 0 where
// the answer is later.
#pragma once

#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/attention_shared.cuh"

namespace fusedrec::attention {

class TimeFunction {
 public:
  __device__ explicit TimeFunction(const RelativeBias& tables) : kind_(tables.time) {
    if (!HasFunction(tables)) return;
    a_ = tables.time_weights[0];
    const float b = tables.time_weights[1];
    rate_ = kind_ == TimeMap::kPower ? b : expf(b);
    if (kind_ != TimeMap::kStretched) return;
    rate_ = (b > 0.0f ? b : 0.0f) + logf(1.0f + expf(b > 0.0f ? -b : b));  // softplus
    rate_slope_ = 1.0f / (1.0f + expf(-b));
    exponent_ = tables.time_weights[2];
  }

  __device__ float At(int64_t ask, int64_t answer, float* slopes) const {
    const float difference = ask > answer ? static_cast<float>(TimeBetween(ask, answer)) : 0.0f;
    slopes[2] = 0.0f;
    if (kind_ == TimeMap::kExponential) {
      const float power = rate_ * difference;
      slopes[0] = expf(-power);
      slopes[1] = -a_ * slopes[0] * power;
    } else {
      const float log = logf(difference + 1.0f);
      const float power = kind_ == TimeMap::kPower ? log : expf(exponent_ * log);
      slopes[0] = expf(-rate_ * power);
      slopes[1] = -a_ * slopes[0] * power * rate_slope_;
      slopes[2] = -a_ * slopes[0] * rate_ * power * log;
    }
    return a_ * slopes[0];
  }

 private:
  TimeMap kind_;
  float a_ = 0.0f, rate_ = 0.0f, rate_slope_ = 1.0f, exponent_ = 0.0f;
};

// Sums over the pairs of a block, a thread for itself: the sum of a tile first, so that each adds up few numbers.
template <typename T, int D>
class ParameterSums {
 public:
  using S = Shape<T, D>;

  __device__ void Add(float grad, const float* slopes) {
#pragma unroll
    for (int p = 0; p < kTimeParameters; ++p) tile_[p] += grad * slopes[p];
  }
  // Adds the pairs of a tile, keys in rows and queries in columns, whose gradients are `exact`. All threads call it.
  __device__ void AddTile(const BiasTiles<T, D>& tiles, const TimeFunction& function, int rows, int columns) {
    for (int x = threadIdx.x; x < rows * columns; x += S::kThreads) {
      const int r = x / columns, c = x % columns;
      float slopes[kTimeParameters];
      function.At(tiles.column_times[c], tiles.row_times[r], slopes);
      Add(tiles.exact[r * S::kExactStride + c], slopes);
    }
    EndTile();
  }
  __device__ void EndTile() {
#pragma unroll
    for (int p = 0; p < kTimeParameters; ++p) {
      total_[p] += tile_[p];
      tile_[p] = 0.0f;
    }
  }
  // Writes the sums to the memory of this block. All threads call it.
  __device__ void Write(const Problem<T>& problem, float* time_sums) const {
#pragma unroll
    for (int p = 0; p < kTimeParameters; ++p) {
      const float sum = WarpSum(total_[p]);
      if (Lane() == 0) time_sums[Warp() * kTimeParameters + p] = sum;
    }
    __syncthreads();
    const int size = static_cast<int>(NumTimeWeights(problem.bias));
    if (static_cast<int>(threadIdx.x) >= size) return;
    float sum = 0.0f;
    for (int w = 0; w < S::kWarps; ++w) sum += time_sums[w * kTimeParameters + threadIdx.x];
    problem.time_slots[static_cast<int64_t>(blockIdx.x) * size + threadIdx.x] = sum;
  }

 private:
  float tile_[kTimeParameters] = {}, total_[kTimeParameters] = {};
};

}  // namespace fusedrec::attention
