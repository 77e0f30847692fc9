// The shared memory of a block of attention.
#pragma once

#include "common/host_device.h"
#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/attention_tiles.cuh"

namespace fusedrec::attention {

constexpr int kNoBucket = 0xffff;  // of a pair that is hidden
constexpr int kSharedThresholds = 1024;  // more than these stay in device memory

// Cuts memory into arrays that begin at multiples of 16 bytes.
struct Taker {
  unsigned char* memory;
  int bytes;

  template <typename Number>
  FUSEDREC_HOST_DEVICE void operator()(Number** array, int count) {
#ifdef __CUDA_ARCH__
    *array = reinterpret_cast<Number*>(memory + bytes);
#else
    *array = reinterpret_cast<Number*>(reinterpret_cast<uintptr_t>(memory) + bytes);  // of null, too
#endif
    bytes += (count * static_cast<int>(sizeof(Number)) + 15) / 16 * 16;
  }
};

template <typename T, int D>
struct BiasTiles {
  using S = Shape<T, D>;
  float* exact;       // [kRows, kExactStride]: gradients of the pairs
  uint16_t* buckets;  // the same shape
  int64_t *row_times, *column_times;
  float* distances;
  float* time_sums;  // [kTimeWarps, J+1], or [kWarps, kTimeParameters]
  RelativeBias bias;  // thresholds and time_weights in shared memory, unless they are too many

  FUSEDREC_HOST_DEVICE void CarveBias(Taker* take, bool grads, const RelativeBias& tables) {
    const int num_thresholds = HasBuckets(tables) ? tables.num_thresholds : -1;
    (*take)(&exact, grads ? S::kRows * S::kExactStride : 0);
    (*take)(&buckets, grads && num_thresholds >= 0 ? S::kRows * S::kExactStride : 0);
    (*take)(&row_times, HasTime(tables) ? S::kRows : 0);
    (*take)(&column_times, HasTime(tables) ? S::kColumns : 0);
    (*take)(&distances, S::kRows + S::kColumns);
    const int sums = HasFunction(tables) ? S::kWarps * kTimeParameters : S::kTimeWarps * (num_thresholds + 1);
    (*take)(&time_sums, grads ? sums : 0);
    const int shared_thresholds = num_thresholds <= kSharedThresholds ? num_thresholds : -1;
    (*take)(&thresholds_, shared_thresholds >= 0 ? shared_thresholds : 0);
    (*take)(&time_weights_, shared_thresholds + 1);
  }

  __device__ void LoadTables(const RelativeBias& from) {
    bias = from;
    if (from.num_thresholds > kSharedThresholds || !HasBuckets(from)) return;
    bias.thresholds = thresholds_;
    bias.time_weights = time_weights_;
    for (int g = threadIdx.x; g < from.num_thresholds; g += S::kThreads) thresholds_[g] = from.thresholds[g];
    for (int g = threadIdx.x; g <= from.num_thresholds; g += S::kThreads) time_weights_[g] = from.time_weights[g];
  }

  // Loads the weights of the distances between queries [q0, q1) and keys [k0, k1), from LowestDistance on.
  __device__ void LoadDistances(const RowMask& mask, int q0, int q1, int k0, int k1) {
    const int low = LowestDistance(mask, q1, k0), high = mask.Place(k1 - 1) - mask.Place(q0);
    const float* const weights = bias.position_weights + bias.max_length - 1 + low;
    for (int q = threadIdx.x; q <= high - low; q += S::kThreads) distances[q] = weights[q];
  }

 private:
  int64_t* thresholds_;
  float* time_weights_;
};

// All of a block of attention with queries and keys.
template <typename T, int D>
struct SharedTiles : BiasTiles<T, D> {
  using S = Shape<T, D>;
  T *row_a, *row_b, *column_a, *column_b;  // [kRows or kColumns, kStride]
  T *pair_a, *pair_b;                      // [kRows, kPairStride]
  float* scale;

  FUSEDREC_HOST_DEVICE int Carve(unsigned char* memory, bool backward, bool key_rows, const RelativeBias& tables) {
    Taker take{memory, 0};
    take(&row_a, S::kRows * S::kStride);
    take(&row_b, backward ? S::kRows * S::kStride : 0);
    take(&column_a, S::kColumns * S::kStride);
    take(&column_b, S::kColumns * S::kStride);
    take(&pair_a, S::kRows * S::kPairStride);
    take(&pair_b, key_rows ? S::kRows * S::kPairStride : 0);
    take(&scale, S::kRows > S::kColumns ? S::kRows : S::kColumns);
    this->CarveBias(&take, key_rows, tables);
    return take.bytes;
  }
};

}  // namespace fusedrec::attention
