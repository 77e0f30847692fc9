// Kernels of gradients that wait for their update: a sum per row over several lookups, or parts of one (gradient_sum.h).
//
// A row's number leads to its sum, without a search. Each call numbers the rows of all its handles, which are distinct, by
// their places. So no threads contend, and a sum adds the totals of the calls in their order, as on the CPU.
#pragma once

#include "hash_table/cuda/update/update.cuh"

namespace fusedrec {
namespace device_table {

struct SumsView {
  uint32_t* sum_of_row;  // [rows of the table]; kNowhere: the row has none
  int64_t* rows;         // [sums] row of each sum; ~row until a gradient comes, and where an earlier sum is the row's
  float* sums;           // [sums, dim]
};

// Sums [first, first + num_handles) for the rows without one.
static __global__ void __launch_bounds__(kUpdateThreads)
    NumberSumsKernel(SumsView view, const int64_t* __restrict__ handles, int64_t num_handles, int64_t first) {
  const int64_t u = GlobalThread();
  if (u >= num_handles) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]);
  view.rows[first + u] = ~static_cast<int64_t>(row);
  if (row == kNowhere) return;  // admission refused the id
  if (view.sum_of_row[row] == kNowhere) view.sum_of_row[row] = static_cast<uint32_t>(first + u);
}

// Adds the gradients of each handle, if it has any. u goes to left_out where the sum ceases to be finite.
static __global__ void __launch_bounds__(kUpdateThreads)
    AddToSumsKernel(SumsView view, const int64_t* __restrict__ handles, int64_t num_handles,
                    const int32_t* __restrict__ begin, GradientColumns grads, int32_t* __restrict__ left_out,
                    unsigned* num_left_out) {
  const int64_t u = GlobalThread() / kRowLanes;
  if (u >= num_handles || handles[u] < 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const unsigned mask = 0xffffu << (threadIdx.x & 16);
  grads.begin = begin[u];
  grads.end = begin[u + 1];
  if (grads.begin == grads.end) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]), number = view.sum_of_row[row];
  float* const sum = view.sums + static_cast<int64_t>(number) * grads.dim;
  bool was_finite = true, is_finite = true;
  for (int d = lane; d < grads.dim; d += kRowLanes) {
    const float before = sum[d], now = before + grads.Sum(d);
    was_finite = was_finite && IsFinite(before);
    is_finite = is_finite && IsFinite(now);
    sum[d] = now;
  }
  was_finite = __all_sync(mask, was_finite);
  is_finite = __all_sync(mask, is_finite);
  if (lane != 0) return;
  view.rows[number] = row;
  if (was_finite && !is_finite) left_out[atomicAdd(num_left_out, 1u)] = static_cast<int32_t>(u);
}

static __global__ void __launch_bounds__(kUpdateThreads) ForgetSumsKernel(SumsView view, int64_t num_sums) {
  const int64_t n = GlobalThread(), row = n < num_sums ? view.rows[n] : kNowhere;
  const int64_t known = row < 0 ? ~row : row;
  if (known != kNowhere) view.sum_of_row[known] = kNowhere;
}

}  // namespace device_table
}  // namespace fusedrec
