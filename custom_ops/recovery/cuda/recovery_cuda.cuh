// Kernels of recovery; the idea stands in recovery_cuda.h.
#pragma once

#include "common/number.cuh"
#include "common/pieces.cuh"
#include "common/row_sort.cuh"

namespace fusedrec {
namespace recovery {

using row_sort::DigitOf;
using stable_split::kThreads;

constexpr int kChunk = 64;  // sorted positions that one group of threads sums

inline __device__ bool InRange(int32_t index, int64_t rows) {
  return static_cast<int64_t>(static_cast<uint32_t>(index)) < rows;
}

// A row is row_words words of type Word; a thread moves one of them.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    RecoverKernel(const Word* __restrict__ rows, int64_t num_rows, int64_t row_words, const int32_t* __restrict__ index,
                  int64_t num_index, Word* __restrict__ out, int64_t out_words) {
  for (int64_t i = GlobalThread(); i < out_words; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t n = i / row_words;
    Word word{};
    if (n < num_index && InRange(index[n], num_rows)) word = rows[index[n] * row_words + i % row_words];
    out[i] = word;
  }
}

// *wrong, 0 before, becomes 1 where bag_splits do not run from 0 to num_index without decreasing, or where an index is
// out of range.
__global__ void __launch_bounds__(kThreads)
    CheckBagsKernel(const int64_t* __restrict__ bag_splits, int64_t num_bags, const int32_t* __restrict__ index,
                    int64_t num_index, int64_t num_rows, unsigned* wrong) {
  bool is_sound = true;
  for (int64_t i = GlobalThread(); i <= num_bags || i < num_index; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (i < num_index) is_sound = is_sound && InRange(index[i], num_rows);
    if (i > num_bags) continue;
    is_sound = is_sound && (i == 0 ? bag_splits[0] == 0 : bag_splits[i - 1] <= bag_splits[i]);
    if (i == num_bags) is_sound = is_sound && bag_splits[i] == num_index;
  }
  if (!is_sound) atomicOr(wrong, 1u);
}

// Rows in one array ...
template <typename T>
struct OneArray {
  const T* __restrict__ rows;
  int64_t dim;

  __device__ const T* Row(int32_t row) const { return rows + row * dim; }
};
// ... or in several, numbered one array after another.
struct RowPart {
  int64_t begin;
  const void* rows;
};
template <typename T>
struct Parts {
  const RowPart* __restrict__ parts;
  int64_t count, dim;

  __device__ const T* Row(int32_t row) const {
    const RowPart& part = PieceOf(parts, count, row);
    return static_cast<const T*>(part.rows) + (row - part.begin) * dim;
  }
};

// Rows of `out` [out_rows, dim] behind the bags become 0.
template <typename T, typename Rows>
__global__ void __launch_bounds__(kThreads)
    PooledRecoverKernel(Rows rows, const int32_t* __restrict__ index, const int64_t* __restrict__ bag_splits,
                        const float* __restrict__ bag_scale, int64_t num_bags, T* __restrict__ out, int64_t out_rows) {
  for (int64_t i = GlobalThread(); i < out_rows * rows.dim; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t g = i / rows.dim, d = i % rows.dim;
    float sum = 0.0f;
    if (g < num_bags) {
      for (int64_t n = bag_splits[g]; n < bag_splits[g + 1]; ++n) sum += ToFloat(rows.Row(index[n])[d]);
      sum *= bag_scale[g];
    }
    out[i] = FromFloat<T>(sum);
  }
}

// bag_of[n]: the bag of position n.
__global__ void __launch_bounds__(kThreads)
    BagOfKernel(const int64_t* __restrict__ bag_splits, int64_t num_bags, int64_t num_index,
                int32_t* __restrict__ bag_of) {
  const int64_t n = GlobalThread();
  if (n >= num_index) return;
  int64_t low = 0, high = num_bags;
  while (low < high) {  // the first bag that ends after n
    const int64_t middle = (low + high) / 2;
    if (bag_splits[middle + 1] > n) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  bag_of[n] = static_cast<int32_t>(low);
}

template <typename T>
struct GradRows {
  const T* __restrict__ grads;
  int64_t dim;
  const int32_t* __restrict__ bag_of;  // null: a row of grads per position
  const float* __restrict__ bag_scale;

  __device__ float At(int32_t n, int64_t d) const {
    if (bag_of == nullptr) return ToFloat(grads[n * dim + d]);
    const int64_t g = bag_of[n];
    return bag_scale[g] * ToFloat(grads[g * dim + d]);
  }
};

// Sums of the rows inside each chunk. `columns` threads, a power of two, share a chunk.
// parts [chunks, 2, dim]: of the row that a chunk begins with and that began before; of the row that goes on behind it.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    RecoverGradSumKernel(GradRows<T> grads, DigitOf sorted, int64_t num_index, int64_t num_rows, int columns,
                         float* __restrict__ parts, T* __restrict__ out) {
  const int64_t chunk = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / columns;
  const int64_t begin = chunk * kChunk, end = begin + kChunk < num_index ? begin + kChunk : num_index;
  if (begin >= num_index) return;
  const uint32_t before = begin > 0 ? sorted.Row(begin - 1) : 0xffffffffu;
  const uint32_t behind = end < num_index ? sorted.Row(end) : 0xffffffffu;
  for (int64_t d = threadIdx.x % columns; d < grads.dim; d += columns) {
    uint32_t row = sorted.Row(begin);
    float sum = 0.0f;
    for (int64_t p = begin; p < end; ++p) {
      sum += grads.At(sorted.order[p], d);
      const uint32_t next = p + 1 < end ? sorted.Row(p + 1) : behind;
      if (next == row && p + 1 < end) continue;
      if (row < num_rows) {
        if (row == before) {
          parts[2 * chunk * grads.dim + d] = sum;
        } else if (next == row) {
          parts[(2 * chunk + 1) * grads.dim + d] = sum;
        } else {
          out[row * grads.dim + d] = FromFloat<T>(sum);
        }
      }
      row = next;
      sum = 0.0f;
    }
  }
}

// The rows of several chunks: the chunk in which one begins adds the parts up.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    RecoverGradJoinKernel(DigitOf sorted, int64_t num_index, int64_t num_rows, int64_t dim, int columns,
                          const float* __restrict__ parts, T* __restrict__ out) {
  const int64_t chunk = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / columns;
  const int64_t begin = chunk * kChunk, end = begin + kChunk;
  if (end >= num_index) return;
  const uint32_t row = sorted.Row(end - 1);
  const bool begins_here = begin == 0 || sorted.Row(begin - 1) != row;
  if (row >= num_rows || sorted.Row(end) != row || !begins_here) return;
  for (int64_t d = threadIdx.x % columns; d < dim; d += columns) {
    float sum = parts[(2 * chunk + 1) * dim + d];
    for (int64_t c = chunk + 1; c * kChunk < num_index && sorted.Row(c * kChunk) == row; ++c) sum += parts[2 * c * dim + d];
    out[row * dim + d] = FromFloat<T>(sum);
  }
}

}  // namespace recovery
}  // namespace fusedrec
