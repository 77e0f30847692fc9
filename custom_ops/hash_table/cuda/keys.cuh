// Kernels that change the key structure as a whole: expansion.
#pragma once

#include "hash_table/cuda/rows.cuh"

namespace fusedrec {
namespace device_table {

// All keys of the old lines into the new, larger ones; a thread per place.
__global__ void __launch_bounds__(256) RehashKernel(const Line* __restrict__ from, int64_t places, SegmentLines to) {
  const int64_t i = GlobalThread();
  if (i >= places) return;
  const Line& line = from[i / kKeysPerLine];
  const int place = static_cast<int>(i % kKeysPerLine);
  if ((line.meta >> place & 1) == 0) return;
  InsertKey(to.lines, to.mask, line.key[place], TableHash(line.key[place]), line.row[place]);
}

}  // namespace device_table
}  // namespace fusedrec
