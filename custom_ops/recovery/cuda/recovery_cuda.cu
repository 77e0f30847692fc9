#include "recovery/cuda/recovery_cuda.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "common/launcher.cuh"
#include "recovery/cuda/recovery_cuda.cuh"

namespace fusedrec {
namespace recovery {
namespace {

constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // positions, rows, bags and columns are 32-bit

int64_t Chunks(int64_t num_index) { return (num_index + kChunk - 1) / kChunk; }

struct Scratch {
  Scratch(void* memory, int64_t num_index, int64_t dim) : carver(memory), sort(&carver, num_index) {
    wrong = carver.Take<unsigned>(1);
    bag_of = carver.Take<int32_t>(num_index);
    parts = carver.Take<float>(2 * Chunks(num_index) * dim);
  }
  Carver carver;
  row_sort::Scratch sort;
  unsigned* wrong;
  int32_t* bag_of;
  float* parts;
};

bool AreSizes(std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return 0 <= size && size <= kMost; });
}

template <typename Word>
int Gather(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index, int64_t num_index, void* out,
           int64_t out_rows, void* stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word)), out_words = out_rows * row_words;
  FUSEDREC_LAUNCH(RecoverKernel<Word>, LoopBlocks(out_words, kThreads), kThreads, 0, stream,
                  static_cast<const Word*>(rows), num_rows, row_words, index, num_index, static_cast<Word*>(out),
                  out_words);
  return LastError();
}

// Waits for the device: whether bags are sound is asked before a kernel follows them. The wait lies in front of the work
// and not behind it, so that the host is free again while the work runs.
int CheckBags(const int64_t* bag_splits, int64_t num_bags, const int32_t* index, int64_t num_index, int64_t num_rows,
              unsigned* wrong, void* stream) {
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(wrong, 0, sizeof(unsigned), stream));
  FUSEDREC_LAUNCH(CheckBagsKernel, LoopBlocks(std::max(num_bags + 1, num_index), kThreads), kThreads, 0, stream,
                  bag_splits, num_bags, index, num_index, num_rows, wrong);
  FUSEDREC_RETURN_IF_CUDA_ERROR(LastError());
  unsigned found = 0;
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToHost(&found, wrong, 1, stream));
  return found == 0 ? kCudaSuccess : kCudaInvalidValue;
}

template <typename T, typename Rows>
int Pool(const Rows& rows, const int32_t* index, const int64_t* bag_splits, const float* bag_scale, int64_t num_bags,
         void* out, int64_t out_rows, void* stream) {
  const auto kernel = &PooledRecoverKernel<T, Rows>;
  FUSEDREC_LAUNCH(kernel, LoopBlocks(out_rows * rows.dim, kThreads), kThreads, 0, stream, rows, index, bag_splits,
                  bag_scale, num_bags, static_cast<T*>(out), out_rows);
  return LastError();
}

// Calls run(number) with a number of the type.
template <typename Run>
int ForType(int type, const Run& run) {
  return type == kNumberFloat ? run(float{}) : type == kNumberHalf ? run(Half{}) : run(Bfloat16{});
}

struct PartsScratch {
  PartsScratch(void* memory, int64_t num_parts) : carver(memory) {
    wrong = carver.Take<unsigned>(1);
    parts = carver.Take<RowPart>(num_parts);
  }
  Carver carver;
  unsigned* wrong;
  RowPart* parts;
};

template <typename T>
int Sum(const void* grads, int64_t dim, const int32_t* index, int64_t num_index, const int64_t* bag_splits,
        const float* bag_scale, int64_t num_bags, void* scratch, void* out, int64_t num_rows, void* stream) {
  const Scratch at(scratch, num_index, dim);
  if (bag_splits != nullptr) {
    FUSEDREC_LAUNCH(BagOfKernel, BlocksFor(num_index, kThreads), kThreads, 0, stream, bag_splits, num_bags, num_index,
                    at.bag_of);
  }
  int32_t* const order = row_sort::SortByRow(at.sort, index, num_index, num_rows, stream);
  const DigitOf sorted{index, order, static_cast<uint32_t>(num_rows), 0};
  const GradRows<T> rows{static_cast<const T*>(grads), dim, bag_splits == nullptr ? nullptr : at.bag_of, bag_scale};
  int columns = 1;
  while (columns < dim && columns < 128) columns *= 2;
  const unsigned blocks = BlocksFor(Chunks(num_index) * columns, kThreads);
  FUSEDREC_LAUNCH(RecoverGradSumKernel<T>, blocks, kThreads, 0, stream, rows, sorted, num_index, num_rows, columns,
                  at.parts, static_cast<T*>(out));
  FUSEDREC_LAUNCH(RecoverGradJoinKernel<T>, blocks, kThreads, 0, stream, sorted, num_index, num_rows, dim, columns,
                  at.parts, static_cast<T*>(out));
  return LastError();
}

}  // namespace
}  // namespace recovery
}  // namespace fusedrec

using namespace fusedrec;            // NOLINT
using namespace fusedrec::recovery;  // NOLINT

int fusedrec_recover(const void* rows, int64_t num_rows, int64_t row_bytes, const int32_t* index, int64_t num_index,
                     void* out, int64_t out_rows, void* stream) {
  if (!AreSizes({num_index, num_rows, row_bytes}) || out_rows < num_index) return kCudaInvalidValue;
  if (out_rows == 0 || row_bytes == 0) return kCudaSuccess;
  auto* const gather = row_bytes % 16 == 0  ? &Gather<uint4>
                             : row_bytes % 4 == 0 ? &Gather<uint32_t>
                                                  : &Gather<uint16_t>;
  return gather(rows, num_rows, row_bytes, index, num_index, out, out_rows, stream);
}

int64_t fusedrec_pooled_recover_scratch_bytes() { return sizeof(unsigned); }

int fusedrec_pooled_recover(int type, const void* rows, int64_t num_rows, int64_t dim, const int32_t* index,
                            int64_t num_index, const int64_t* bag_splits, const float* bag_scale, int64_t num_bags,
                            void* scratch, void* out, void* stream) {
  if (!AreSizes({num_index, num_rows, num_bags, dim}) || type < 0 || type > 2) return kCudaInvalidValue;
  FUSEDREC_RETURN_IF_CUDA_ERROR(
      CheckBags(bag_splits, num_bags, index, num_index, num_rows, static_cast<unsigned*>(scratch), stream));
  if (num_bags == 0 || dim == 0) return kCudaSuccess;
  return ForType(type, [&](auto number) {
    using T = decltype(number);
    return Pool<T>(OneArray<T>{static_cast<const T*>(rows), dim}, index, bag_splits, bag_scale, num_bags, out, num_bags,
                   stream);
  });
}

int64_t fusedrec_pooled_recover_parts_scratch_bytes(int64_t num_parts) {
  return PartsScratch(nullptr, num_parts).carver.bytes();
}

int fusedrec_pooled_recover_parts(int type, const void* const* parts, const int64_t* part_rows, int64_t num_parts,
                                  int64_t dim, const int32_t* index, int64_t num_index, const int64_t* bag_splits,
                                  const float* bag_scale, int64_t num_bags, void* scratch, void* out, int64_t out_rows,
                                  void* stream) {
  if (!AreSizes({num_index, num_bags, dim, out_rows}) || out_rows < num_bags || num_parts < 1 || type < 0 || type > 2) {
    return kCudaInvalidValue;
  }
  std::vector<RowPart> rows;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < num_parts; ++i) {
    if (part_rows[i] < 0 || part_rows[i] > kMost - num_rows) return kCudaInvalidValue;
    rows.push_back({num_rows, parts[i]});
    num_rows += part_rows[i];
  }
  const PartsScratch at(scratch, num_parts);
  FUSEDREC_RETURN_IF_CUDA_ERROR(CopyToDevice(at.parts, rows.data(), num_parts, stream));
  // Waits, so that the copy has read `rows`.
  FUSEDREC_RETURN_IF_CUDA_ERROR(CheckBags(bag_splits, num_bags, index, num_index, num_rows, at.wrong, stream));
  if (out_rows == 0 || dim == 0) return kCudaSuccess;
  return ForType(type, [&](auto number) {
    using T = decltype(number);
    return Pool<T>(Parts<T>{at.parts, num_parts, dim}, index, bag_splits, bag_scale, num_bags, out, out_rows, stream);
  });
}

int64_t fusedrec_recover_grad_scratch_bytes(int64_t num_index, int64_t dim) {
  return Scratch(nullptr, num_index, dim).carver.bytes();
}

int fusedrec_recover_grad(int type, const void* grads, int64_t dim, const int32_t* index, int64_t num_index,
                          const int64_t* bag_splits, const float* bag_scale, int64_t num_bags, void* scratch, void* out,
                          int64_t num_rows, int64_t out_rows, void* stream) {
  if (!AreSizes({num_index, num_rows, num_bags, dim}) || out_rows < num_rows || type < 0 || type > 2) {
    return kCudaInvalidValue;
  }
  if (bag_splits != nullptr) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(CheckBags(bag_splits, num_bags, index, num_index, num_rows,
                                            Scratch(scratch, num_index, dim).wrong, stream));
  }
  const int64_t number_bytes = type == kNumberFloat ? 4 : 2;
  FUSEDREC_RETURN_IF_CUDA_ERROR(Fill(out, 0, out_rows * dim * number_bytes, stream));
  if (num_index == 0 || dim == 0) return kCudaSuccess;
  auto* const sum = type == kNumberFloat ? &Sum<float> : type == kNumberHalf ? &Sum<Half> : &Sum<Bfloat16>;
  return sum(grads, dim, index, num_index, bag_splits, bag_scale, num_bags, scratch, out, num_rows, stream);
}
