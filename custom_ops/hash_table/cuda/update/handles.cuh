// Checks of handles and of an inverse before a kernel follows them. In TensorFlow they are ordinary tensors, and an index
// out of range would end the process. The same pass tells whether gradients are finite.
#pragma once

#include "common/device.cuh"
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"

namespace fusedrec {
namespace device_table {

constexpr int kHandleThreads = 256;
constexpr unsigned kHandleBlocks = 132 * 4;  // of a loop that waits for memory alone

__device__ inline unsigned Smaller(unsigned a, unsigned b) { return a < b ? a : b; }

static __global__ void __launch_bounds__(kHandleThreads)
    HandleFactsKernel(TableView table, const int64_t* __restrict__ handles, int64_t num_handles,
                      const int32_t* __restrict__ inverse, int64_t num_ids, int64_t num_rows, Numbers grads,
                      const uint32_t* __restrict__ sum_of_row, uint32_t attempt, HandleFacts* facts) {
  unsigned oldest = ~0u, newest = ~0u;
  const bool trains = inverse != nullptr;  // an id that admission refused has the handle -1
  bool handles_are_sound = true, inverse_is_sound = true, grads_are_finite = true, all_have_sums = sum_of_row != nullptr;
  bool handles_are_distinct = true;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kHandleThreads;
  for (int64_t n = GlobalThread(); n < num_handles; n += threads) {
    const int64_t handle = handles[n];
    if (trains && handle == -1) continue;
    const unsigned clock = static_cast<unsigned>(static_cast<uint64_t>(handle) >> 32);
    handles_are_sound = handles_are_sound && handle >= 0 && (handle & 0xffffffff) < num_rows;
    all_have_sums = all_have_sums && handles_are_sound && sum_of_row[handle & 0xffffffff] != kNowhere;
    oldest = Smaller(oldest, clock);
    newest = Smaller(newest, ~clock);
    if (!trains || !handles_are_sound) continue;
    RowMeta* const meta = table.Meta(static_cast<uint32_t>(handle));
    const unsigned long long touched = atomicMax(&meta->touch, TouchOf(attempt, static_cast<uint32_t>(n)));
    handles_are_distinct = handles_are_distinct && AttemptOf(touched) != attempt;
  }
  if (inverse != nullptr) {
    for (int64_t n = GlobalThread(); n < num_ids; n += threads) {
      inverse_is_sound = inverse_is_sound && 0 <= inverse[n] && inverse[n] < num_handles;
    }
  }
  for (int64_t n = GlobalThread(); n < grads.count; n += threads) {
    grads_are_finite = grads_are_finite && IsFinite(LoadNumber(grads.storage, grads.data, n));
  }
  for (int d = 16; d > 0; d >>= 1) {
    oldest = Smaller(oldest, __shfl_xor_sync(kFullWarp, oldest, d));
    newest = Smaller(newest, __shfl_xor_sync(kFullWarp, newest, d));
  }
  handles_are_sound = __all_sync(kFullWarp, handles_are_sound);
  handles_are_distinct = __all_sync(kFullWarp, handles_are_distinct);
  inverse_is_sound = __all_sync(kFullWarp, inverse_is_sound);
  grads_are_finite = __all_sync(kFullWarp, grads_are_finite);
  all_have_sums = __all_sync(kFullWarp, all_have_sums);
  if (Lane() != 0) return;
  if (oldest != ~0u) atomicMin(&facts->oldest, oldest);
  if (newest != ~0u) atomicMin(&facts->newest, newest);
  if (!handles_are_sound) facts->handles_are_sound = 0;
  if (!handles_are_distinct) facts->handles_are_distinct = 0;
  if (!inverse_is_sound) facts->inverse_is_sound = 0;
  if (!grads_are_finite) facts->grads_are_finite = 0;
  if (!all_have_sums) facts->all_have_sums = 0;
}

}  // namespace device_table
}  // namespace fusedrec
