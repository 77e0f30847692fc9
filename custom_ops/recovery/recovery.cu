#include "recovery/recovery_cuda.h"

#include "common/number.cuh"
#include "common/pieces.cuh"
#include "common/sort.cuh"

namespace fusedrec::recovery {

constexpr int kChunk = 64;  // sorted positions that one group of threads sums

inline __device__ bool InRange(int32_t index, int64_t rows) {
  return static_cast<int64_t>(static_cast<uint32_t>(index)) < rows;
}

// A row is row_words words of type Word; a thread moves one of them.
template <typename Word>
FUSEDREC_KERNEL RecoverKernel(const Word* __restrict__ rows, int64_t num_rows, int64_t row_words,
    const int32_t* __restrict__ index, int64_t num_index, Word* __restrict__ out, int64_t out_words) {
  for (int64_t i = GlobalThread(); i < out_words; i += GridThreads()) {
    const int64_t n = i / row_words;
    Word word{};
    if (n < num_index && InRange(index[n], num_rows)) word = rows[index[n] * row_words + i % row_words];
    out[i] = word;
  }
}

// *wrong, 0 before, becomes 1 where bag_splits do not run from 0 to num_index without decreasing, or where an index is
// out of range.
FUSEDREC_KERNEL CheckBagsKernel(const int64_t* __restrict__ bag_splits, int64_t num_bags,
    const int32_t* __restrict__ index, int64_t num_index, int64_t num_rows, unsigned* wrong) {
  bool is_sound = true;
  for (int64_t i = GlobalThread(); i <= num_bags || i < num_index; i += GridThreads()) {
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

// Rows of `out` [out_rows, dim] after the bags become 0.
template <typename T, typename Rows>
FUSEDREC_KERNEL PooledRecoverKernel(Rows rows, const int32_t* __restrict__ index,
                                    const int64_t* __restrict__ bag_splits, const float* __restrict__ bag_scale,
                                    int64_t num_bags, T* __restrict__ out, int64_t out_rows) {
  for (int64_t i = GlobalThread(); i < out_rows * rows.dim; i += GridThreads()) {
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
FUSEDREC_KERNEL BagOfKernel(const int64_t* __restrict__ bag_splits, int64_t num_bags, int64_t num_index,
                            int32_t* __restrict__ bag_of) {
  const int64_t n = GlobalThread();
  if (n >= num_index) return;
  // The last bag that begins at n or before: empty bags before it begin there as well.
  bag_of[n] = static_cast<int32_t>(LastBegun([&](int64_t g) { return bag_splits[g]; }, int64_t{0}, num_bags - 1, n));
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
// parts [chunks, 2, dim]: of the row that a chunk begins with and that began before; of the row that goes on in the next chunk.
template <typename T>
FUSEDREC_KERNEL RecoverGradSumKernel(GradRows<T> grads, Sorted sorted, int64_t num_index, int64_t num_rows, int columns,
                                     float* __restrict__ parts, T* __restrict__ out) {
  const int64_t chunk = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / columns;
  const int64_t begin = chunk * kChunk, end = begin + kChunk < num_index ? begin + kChunk : num_index;
  if (begin >= num_index) return;
  const uint32_t before = begin > 0 ? sorted.keys[begin - 1] : 0xffffffffu;
  const uint32_t after_chunk = end < num_index ? sorted.keys[end] : 0xffffffffu;
  for (int64_t d = threadIdx.x % columns; d < grads.dim; d += columns) {
    uint32_t row = sorted.keys[begin];
    float sum = 0.0f;
    for (int64_t p = begin; p < end; ++p) {
      sum += grads.At(sorted.positions[p], d);
      const uint32_t next = p + 1 < end ? sorted.keys[p + 1] : after_chunk;
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
FUSEDREC_KERNEL RecoverGradJoinKernel(Sorted sorted, int64_t num_index, int64_t num_rows, int64_t dim, int columns,
                                      const float* __restrict__ parts, T* __restrict__ out) {
  const int64_t chunk = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / columns;
  const int64_t begin = chunk * kChunk, end = begin + kChunk;
  if (end >= num_index) return;
  const uint32_t row = sorted.keys[end - 1];
  const bool begins_here = begin == 0 || sorted.keys[begin - 1] != row;
  if (row >= num_rows || sorted.keys[end] != row || !begins_here) return;
  for (int64_t d = threadIdx.x % columns; d < dim; d += columns) {
    float sum = parts[(2 * chunk + 1) * dim + d];
    for (int64_t c = chunk + 1; c * kChunk < num_index && sorted.keys[c * kChunk] == row; ++c) sum += parts[2 * c * dim + d];
    out[row * dim + d] = FromFloat<T>(sum);
  }
}

}  // namespace fusedrec::recovery

#ifndef __CUDACC_RTC__
using namespace fusedrec;            // NOLINT
using namespace fusedrec::recovery;  // NOLINT

namespace {

int64_t Chunks(int64_t num_index) { return (num_index + kChunk - 1) / kChunk; }

template <typename Word>
int Gather(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index, int64_t num_index, void* out,
           int64_t out_rows, void* stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word)), out_words = out_rows * row_words;
  FUSEDREC_LOOP(RecoverKernel<Word>, out_words, stream, static_cast<const Word*>(rows), num_rows, row_words, index,
                num_index, static_cast<Word*>(out), out_words);
  return LastError();
}

// Waits for the device: kernels follow bags only after this check. The wait precedes the work, so the host is free while
// the work runs.
int CheckBags(const int64_t* bag_splits, int64_t num_bags, const int32_t* index, int64_t num_index, int64_t num_rows,
              ScratchMemory* scratch, void* stream) {
  unsigned *wrong, answer = 0;
  FUSEDREC_TRY(scratch->Take({{&wrong, 1}}));
  FUSEDREC_TRY(Fill(wrong, 0, sizeof(unsigned), stream));
  FUSEDREC_LOOP(CheckBagsKernel, std::max(num_bags + 1, num_index), stream, bag_splits, num_bags, index, num_index,
                num_rows, wrong);
  FUSEDREC_TRY(LastError());
  FUSEDREC_TRY(CopyToHost(&answer, wrong, 1, stream));
  return answer == 0 ? kCudaSuccess : kCudaInvalidValue;
}

template <typename T, typename Rows>
int Pool(const Rows& rows, const int32_t* index, const int64_t* bag_splits, const float* bag_scale, int64_t num_bags,
         void* out, int64_t out_rows, void* stream) {
  const auto kernel = &PooledRecoverKernel<T, Rows>;
  FUSEDREC_LOOP(kernel, out_rows * rows.dim, stream, rows, index, bag_splits, bag_scale, num_bags, static_cast<T*>(out),
                out_rows);
  return LastError();
}

// Calls run(number) with a number of the type.
template <typename Run>
int ForType(int type, const Run& run) {
  return type == kNumberFloat ? run(float{}) : type == kNumberHalf ? run(Half{}) : run(Bfloat16{});
}

template <typename T>
int Sum(const void* grads, int64_t dim, const int32_t* index, int64_t num_index, const int64_t* bag_splits,
        const float* bag_scale, int64_t num_bags, ScratchMemory* scratch, void* out, int64_t num_rows, void* stream) {
  int32_t* bag_of;
  float* parts;
  FUSEDREC_TRY(scratch->Take({{&bag_of, bag_splits == nullptr ? 0 : num_index},
                              {&parts, 2 * Chunks(num_index) * dim}}));
  if (bag_splits != nullptr) {
    FUSEDREC_FOR_EACH(BagOfKernel, num_index, stream, bag_splits, num_bags, num_index, bag_of);
  }
  PositionSort sort;
  Sorted sorted;
  FUSEDREC_TRY(sort.Take(num_index, scratch));
  FUSEDREC_TRY(sort.ByRow(index, num_rows, &sorted, stream));
  const GradRows<T> rows{static_cast<const T*>(grads), dim, bag_splits == nullptr ? nullptr : bag_of, bag_scale};
  int columns = 1;
  while (columns < dim && columns < 128) columns *= 2;
  const unsigned blocks = BlocksFor(Chunks(num_index) * columns, kThreads);
  FUSEDREC_LAUNCH(RecoverGradSumKernel<T>, blocks, kThreads, 0, stream, rows, sorted, num_index, num_rows, columns,
                  parts, static_cast<T*>(out));
  FUSEDREC_LAUNCH(RecoverGradJoinKernel<T>, blocks, kThreads, 0, stream, sorted, num_index, num_rows, dim, columns,
                  parts, static_cast<T*>(out));
  return LastError();
}

}  // namespace

int fusedrec_recover(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index, int64_t num_index,
                     void* out, int64_t out_rows, void* stream) {
  if (out_rows == 0 || row_bytes == 0) return kCudaSuccess;
  auto* const gather = row_bytes % 16 == 0  ? &Gather<uint4>
                             : row_bytes % 4 == 0 ? &Gather<uint32_t>
                                                  : &Gather<uint16_t>;
  return gather(rows, num_rows, row_bytes, index, num_index, out, out_rows, stream);
}

int fusedrec_pooled_recover(int type, const void* const* parts, const int64_t* part_rows, int64_t num_parts, int64_t dim,
                            const int32_t* index, int64_t num_index, const int64_t* bag_splits, const float* bag_scale,
                            int64_t num_bags, const FusedrecAllocator* memory, void* out, int64_t out_rows, void* stream) {
  std::vector<RowPart> rows;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < num_parts; ++i) {
    rows.push_back({num_rows, parts[i]});
    num_rows += part_rows[i];
  }
  RowPart* on_device = nullptr;
  ScratchMemory scratch(memory);
  if (num_parts > 1) {
    FUSEDREC_TRY(scratch.Take({{&on_device, num_parts}}));
    FUSEDREC_TRY(CopyToDevice(on_device, rows.data(), num_parts, stream));
  }
  // Waits, so that the copy has read `rows`.
  FUSEDREC_TRY(CheckBags(bag_splits, num_bags, index, num_index, num_rows, &scratch, stream));
  if (out_rows == 0 || dim == 0) return kCudaSuccess;
  return ForType(type, [&](auto number) {
    using T = decltype(number);
    const auto pool = [&](const auto& of) {
      return Pool<T>(of, index, bag_splits, bag_scale, num_bags, out, out_rows, stream);
    };
    return num_parts == 1 ? pool(OneArray<T>{static_cast<const T*>(parts[0]), dim}) : pool(Parts<T>{on_device, num_parts, dim});
  });
}

int fusedrec_recover_grad(int type, const void* grads, int64_t dim, const int32_t* index, int64_t num_index,
                          const int64_t* bag_splits, const float* bag_scale, int64_t num_bags,
                          const FusedrecAllocator* memory, void* out, int64_t num_rows, int64_t out_rows, void* stream) {
  ScratchMemory scratch(memory);
  if (bag_splits != nullptr) {
    FUSEDREC_TRY(CheckBags(bag_splits, num_bags, index, num_index, num_rows, &scratch, stream));
  }
  const int64_t number_bytes = type == kNumberFloat ? 4 : 2;
  FUSEDREC_TRY(Fill(out, 0, out_rows * dim * number_bytes, stream));
  if (num_index == 0 || dim == 0) return kCudaSuccess;
  auto* const sum = type == kNumberFloat ? &Sum<float> : type == kNumberHalf ? &Sum<Half> : &Sum<Bfloat16>;
  return sum(grads, dim, index, num_index, bag_splits, bag_scale, num_bags, &scratch, out, num_rows, stream);
}
#endif
