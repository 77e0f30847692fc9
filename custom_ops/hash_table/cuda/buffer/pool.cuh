// Records of the pool of hot rows.
#pragma once

#include "common/device.cuh"

namespace fusedrec {
namespace device_table {

constexpr int kPoolThreads = 256;

// A warp per record, which begins at any even address (record_layout.cuh): records[n] = pool[slots[n]].
static __global__ void __launch_bounds__(kPoolThreads)
    CopyRecordsKernel(const char* __restrict__ pool, const int64_t* __restrict__ slots, int64_t count, int64_t record_bytes,
                      char* __restrict__ records) {
  const int64_t n = GlobalThread() / 32;
  if (n >= count) return;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(pool + slots[n] * record_bytes);
  uint16_t* const to = reinterpret_cast<uint16_t*>(records + n * record_bytes);
  for (int64_t i = Lane(); i < record_bytes / 2; i += 32) to[i] = from[i];
}

}  // namespace device_table
}  // namespace fusedrec
