// Sizes of the tiles of attention, and how they are filled and written.
#pragma once

#include "jagged_attention/cuda/attention_engine.cuh"

namespace fusedrec::attention {

// The columns of a tensor that a tile has: all columns of one head, or the next columns of all heads, which lie `apart`.
struct HeadColumns {
  int count;

  __device__ int64_t At(int column) const { return column; }
  __device__ bool HasChunks(int chunk) const { return count % chunk == 0; }
};
struct AllColumns {
  int count, first, head_dim;
  int64_t apart;

  __device__ int64_t At(int column) const { return (first + column) / head_dim * apart + (first + column) % head_dim; }
  __device__ bool HasChunks(int chunk) const { return head_dim % chunk == 0; }
};

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

  // Loads rows [begin, end) of a tensor. Missing rows become 0.
  template <typename Columns>
  static __device__ void LoadRows(const T* tensor, int64_t stride, const Columns& columns, int begin, int end, int rows,
                                  T* tile) {
    constexpr int kChunk = 16 / sizeof(T);
    if (columns.HasChunks(kChunk) && stride % kChunk == 0 && reinterpret_cast<uintptr_t>(tensor) % 16 == 0) {
      for (int x = threadIdx.x; x < rows * (D / kChunk); x += kThreads) {
        const int row = x / (D / kChunk), column = x % (D / kChunk) * kChunk;
        uint4 chunk{};
        if (begin + row < end && column < columns.count) {
          chunk = *reinterpret_cast<const uint4*>(tensor + (begin + row) * stride + columns.At(column));
        }
        *reinterpret_cast<uint4*>(tile + row * kStride + column) = chunk;
      }
      return;
    }
    for (int x = threadIdx.x; x < rows * D; x += kThreads) {
      const int row = x / D, column = x % D;
      T number{};
      if (begin + row < end && column < columns.count) number = tensor[(begin + row) * stride + columns.At(column)];
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

  // Calls body(row, column, number) for the numbers that this thread holds, of a warp's columns from `base` on.
  template <int kBlocks, typename Body>
  static __device__ void ForHeld(const float (*held)[4], int base, const Body& body) {
    const int row = RowBase() + (Lane() >> 2), column = base + 2 * (Lane() & 3);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(row + (e >> 1) * 8, column + 8 * n + (e & 1), held[n][e]);
    }
  }
  // Writes the pairs that the warps hold to pairs [kRows, kPairStride], times the scale of column or row (null: 1).
  static __device__ void StorePairs(const float (*held)[4], const float* scale, bool scale_of_column, T* pairs) {
    ForHeld<kPairBlocks>(held, ColumnBase(), [=](int r, int c, float number) {
      const float factor = scale == nullptr ? 1.0f : scale[scale_of_column ? c : r];
      pairs[r * kPairStride + c] = FromFloat<T>(factor * number);
    });
  }
  // Writes the same in float32, [kRows, kExactStride], with the scale of the column (null: 1).
  static __device__ void StoreExact(const float (*held)[4], const float* scale, float* exact) {
    ForHeld<kPairBlocks>(held, ColumnBase(), [=](int r, int c, float number) {
      exact[r * kExactStride + c] = (scale == nullptr ? 1.0f : scale[c]) * number;
    });
  }
  // Writes rows [begin, end) of a tensor: the sums times `factor` and the scale of the row (null: 1).
  template <typename Columns>
  static __device__ void WriteRows(const float (*sums)[4], const float* scale, float factor, T* tensor, int64_t stride,
                                   const Columns& columns, int begin, int end) {
    ForHeld<kDimBlocks>(sums, DimBase(), [=](int r, int c, float number) {
      if (begin + r >= end || c >= columns.count) return;
      const float by = scale == nullptr ? factor : factor * scale[r];
      tensor[(begin + r) * stride + columns.At(c)] = FromFloat<T>(by * number);
    });
  }
};

}  // namespace fusedrec::attention
