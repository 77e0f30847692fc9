// Sizes of the tiles of attention, how they lie in shared memory, and how they are filled and written.
#ifndef FUSEDREC_JAGGED_ATTENTION_ATTENTION_TILES_CUH_
#define FUSEDREC_JAGGED_ATTENTION_ATTENTION_TILES_CUH_

#include "common/host_device.h"
#include "jagged_attention/attention_engine.cuh"
#include "jagged_attention/attention_pairs.cuh"

namespace fusedrec {
namespace attention {

constexpr int kNoBucket = 0xffff;  // of a pair that is hidden
constexpr int kSharedThresholds = 1024;  // more than these stay in device memory

// Tiles of type T and D columns of queries, keys and values. Chosen so that the largest pass fits the shared memory of
// an A100 (163 KiB) and sums of a warp fit its registers.
template <typename T, int D>
struct Shape {
  static constexpr int kRows = sizeof(T) == 2 ? 64 : 32;
  static constexpr int kColumns = sizeof(T) == 2 && D <= 128 ? 64 : 32;
  static constexpr int kWarps = D <= 128 ? 4 : 8, kThreads = 32 * kWarps;
  // A warp has 16 rows, and a share of the columns.
  static constexpr int kRowWarps = kRows / 16, kColumnWarps = kWarps / kRowWarps;
  static constexpr int kPairBlocks = kColumns / 8 / kColumnWarps, kDimBlocks = D / 8 / kColumnWarps;
  static constexpr int kStride = D + Engine<T>::kPad, kPairStride = kColumns + Engine<T>::kPad;
  static constexpr int kExactStride = kColumns + 1;
  static constexpr int kTimeWarps = kRows / 32;  // a lane per row

  static __device__ int RowBase() { return Warp() % kRowWarps * 16; }
  static __device__ int ColumnBase() { return Warp() / kRowWarps * (kColumns / kColumnWarps); }
  static __device__ int DimBase() { return Warp() / kRowWarps * (D / kColumnWarps); }

  // Rows [begin, end) of a tensor, `dim` columns; what is missing becomes 0.
  static __device__ void LoadRows(const T* tensor, int64_t stride, int dim, int begin, int end, int rows, T* tile) {
    constexpr int kChunk = 16 / sizeof(T);
    if (dim % kChunk == 0 && stride % kChunk == 0 && reinterpret_cast<uintptr_t>(tensor) % 16 == 0) {
      for (int x = threadIdx.x; x < rows * (D / kChunk); x += kThreads) {
        const int row = x / (D / kChunk), column = x % (D / kChunk) * kChunk;
        uint4 chunk{};
        if (begin + row < end && column < dim) {
          chunk = *reinterpret_cast<const uint4*>(tensor + (begin + row) * stride + column);
        }
        *reinterpret_cast<uint4*>(tile + row * kStride + column) = chunk;
      }
      return;
    }
    for (int x = threadIdx.x; x < rows * D; x += kThreads) {
      const int row = x / D, column = x % D;
      T number{};
      if (begin + row < end && column < dim) number = tensor[(begin + row) * stride + column];
      tile[row * kStride + column] = number;
    }
  }
  static __device__ void LoadTimes(const int64_t* times, int begin, int end, int rows, int64_t* tile) {
    for (int row = threadIdx.x; row < rows; row += kThreads) tile[row] = begin + row < end ? times[begin + row] : 0;
  }
  static __device__ void LoadScale(const float* scale, int64_t first, int64_t stride, int begin, int end, int rows,
                                   float* tile) {
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      tile[row] = begin + row < end ? scale[(first + begin + row) * stride] : 0.0f;
    }
  }

  // pairs [kRows, kPairStride] = what the warps hold, times the scale of the column or the row (null: 1).
  static __device__ void StorePairs(const float (*held)[4], const float* scale, bool scale_of_column, T* pairs) {
    const int row = RowBase() + (Lane() >> 2), column = ColumnBase() + 2 * (Lane() & 3);
#pragma unroll
    for (int n = 0; n < kPairBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + (e >> 1) * 8, c = column + 8 * n + (e & 1);
        const float factor = scale == nullptr ? 1.0f : scale[scale_of_column ? c : r];
        pairs[r * kPairStride + c] = FromFloat<T>(factor * held[n][e]);
      }
    }
  }
  // The same in float32, [kRows, kExactStride], with the scale of the column.
  static __device__ void StoreExact(const float (*held)[4], const float* scale, float* exact) {
    const int row = RowBase() + (Lane() >> 2), column = ColumnBase() + 2 * (Lane() & 3);
#pragma unroll
    for (int n = 0; n < kPairBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int c = column + 8 * n + (e & 1);
        exact[(row + (e >> 1) * 8) * kExactStride + c] = scale[c] * held[n][e];
      }
    }
  }
  // Rows [begin, end) of a tensor = sums, times `factor` and the scale of the row (null: 1).
  static __device__ void WriteRows(const float (*sums)[4], const float* scale, float factor, T* tensor, int64_t stride,
                                   int dim, int begin, int end) {
    const int row = RowBase() + (Lane() >> 2), column = DimBase() + 2 * (Lane() & 3);
#pragma unroll
    for (int n = 0; n < kDimBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + (e >> 1) * 8, c = column + 8 * n + (e & 1);
        if (begin + r >= end || c >= dim) continue;
        const float by = scale == nullptr ? factor : factor * scale[r];
        tensor[(begin + r) * stride + c] = FromFloat<T>(by * sums[n][e]);
      }
    }
  }
};

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

// What a block has in shared memory.
template <typename T, int D>
struct SharedTiles {
  using S = Shape<T, D>;
  T *row_a, *row_b, *column_a, *column_b;  // [kRows or kColumns, kStride]
  T *pair_a, *pair_b;                      // [kRows, kPairStride]
  float* exact;                            // [kRows, kExactStride]: gradients of the pairs, for the bias
  uint16_t* buckets;                       // the same shape
  int64_t *row_times, *column_times;
  float *scale, *distances;
  float* time_sums;  // [kTimeWarps, G+1]
  BiasTables bias;   // thresholds and time_weights in shared memory, unless they are too many

  // Returns the bytes that are needed.
  FUSEDREC_HOST_DEVICE int Carve(unsigned char* memory, bool backward, bool key_rows, int num_thresholds) {
    Taker take{memory, 0};
    take(&row_a, S::kRows * S::kStride);
    take(&row_b, backward ? S::kRows * S::kStride : 0);
    take(&column_a, S::kColumns * S::kStride);
    take(&column_b, S::kColumns * S::kStride);
    take(&pair_a, S::kRows * S::kPairStride);
    take(&pair_b, key_rows ? S::kRows * S::kPairStride : 0);
    take(&exact, key_rows ? S::kRows * S::kExactStride : 0);
    take(&buckets, key_rows && num_thresholds >= 0 ? S::kRows * S::kExactStride : 0);
    take(&row_times, num_thresholds >= 0 ? S::kRows : 0);
    take(&column_times, num_thresholds >= 0 ? S::kColumns : 0);
    take(&scale, S::kRows > S::kColumns ? S::kRows : S::kColumns);
    take(&distances, S::kRows + S::kColumns);
    take(&time_sums, key_rows ? S::kTimeWarps * (num_thresholds + 1) : 0);
    const int shared_thresholds = num_thresholds <= kSharedThresholds ? num_thresholds : -1;
    take(&thresholds_, shared_thresholds >= 0 ? shared_thresholds : 0);
    take(&time_weights_, shared_thresholds + 1);
    return take.bytes;
  }

  __device__ void LoadTables(const BiasTables& from) {
    bias = from;
    if (from.num_thresholds > kSharedThresholds) return;
    bias.thresholds = thresholds_;
    bias.time_weights = time_weights_;
    for (int g = threadIdx.x; g < from.num_thresholds; g += S::kThreads) thresholds_[g] = from.thresholds[g];
    for (int g = threadIdx.x; g <= from.num_thresholds; g += S::kThreads) time_weights_[g] = from.time_weights[g];
  }

 private:
  long long* thresholds_;
  float* time_weights_;
};

}  // namespace attention
}  // namespace fusedrec

#endif  // FUSEDREC_JAGGED_ATTENTION_ATTENTION_TILES_CUH_
