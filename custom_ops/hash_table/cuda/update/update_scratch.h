// Scratch of an update: the gradients of each handle, in the order received.
#pragma once

#include "common/launcher.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace fusedrec {
namespace device_table {

struct UpdateScratch {
  UpdateScratch(void* memory, int64_t num_ids, int64_t num_rows)
      : carver(memory),
        begin(carver.Take<int32_t>(num_rows + 1)),
        count(carver.Take<unsigned>(1)),
        sort(&carver, num_ids) {}

  // Sorts the positions of `inverse` by handle, and writes where the positions of each handle begin.
  const int32_t* Sort(const int32_t* inverse, int64_t num_ids, int64_t num_rows, void* stream) const {
    const int32_t* const order = row_sort::SortByRow(sort, inverse, num_ids, num_rows, stream);
    const row_sort::DigitOf sorted{inverse, order, static_cast<uint32_t>(num_rows), 0};
    FUSEDREC_LAUNCH(BeginsKernel, BlocksFor(num_ids + 1, kUpdateThreads), kUpdateThreads, 0, stream, sorted, num_ids,
                    num_rows, begin);
    return order;
  }

  Carver carver;
  int32_t* begin;   // [num_rows + 1]
  unsigned* count;  // of the rows that are left out
  row_sort::Scratch sort;
};

}  // namespace device_table
}  // namespace fusedrec
