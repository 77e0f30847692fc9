// Scratch of an update: the gradients of each handle, in the order received.
#pragma once

#include "common/launcher.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace fusedrec {
namespace device_table {

struct UpdateScratch {
  explicit UpdateScratch(const FusedrecAllocator& from) : memory(&from) {}

  int Take(int64_t num_ids, int64_t num_rows) {
    FUSEDREC_RETURN_IF_CUDA_ERROR(memory.Take({{&begin, num_rows + 1}, {&count, 1}}));
    return sort.Take(num_ids, &memory);
  }

  // Sorts the positions of `inverse` by handle, and writes where the positions of each handle begin.
  int Sort(const int32_t* inverse, int64_t num_ids, int64_t num_rows, const int32_t** order, void* stream) const {
    Sorted sorted;
    FUSEDREC_RETURN_IF_CUDA_ERROR(sort.ByRow(inverse, num_rows, &sorted, stream));
    FUSEDREC_LAUNCH(BeginsKernel, BlocksFor(num_ids + 1, kUpdateThreads), kUpdateThreads, 0, stream, sorted.keys, num_ids,
                    num_rows, begin);
    *order = sorted.positions;
    return kCudaSuccess;
  }

  ScratchMemory memory;
  PositionSort sort;
  int32_t* begin = nullptr;   // [num_rows + 1]
  unsigned* count = nullptr;  // of the rows that are left out
};

}  // namespace device_table
}  // namespace fusedrec
