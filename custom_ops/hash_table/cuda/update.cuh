// Kernels of the update: they sum gradients over their sources and apply the rule in place (rules/rule.h).
//
// Sixteen lanes share a row. They add the gradients of a column in the order received. A sum over columns is sixteen sums
// of every sixteenth column, added in pairs. The CPU does the same (gradient_sum.h, rule_step.cc), so rows have the same
// bits.
#pragma once

#include "common/sort.cuh"
#include "hash_table/cuda/message.cuh"
#include "hash_table/cuda/rows.cuh"
#include "hash_table/rules/rule.h"

namespace fusedrec::device_table {

constexpr int kRowLanes = 16;  // of one row

// begin[u], for u in [0, num_rows]: number of sorted positions before the first one of row u. rows: of sorted positions.
FUSEDREC_KERNEL BeginsKernel(const uint32_t* __restrict__ rows, int64_t num_index, int64_t num_rows,
                             int32_t* __restrict__ begin) {
  const int64_t p = GlobalThread();
  if (p > num_index) return;
  const int64_t row = p < num_index ? rows[p] : num_rows;
  for (int64_t u = p > 0 ? int64_t{rows[p - 1]} + 1 : 0; u <= row; ++u) begin[u] = static_cast<int32_t>(p);
}

// The summed gradient of one row, a column at a time.
struct GradientColumns {
  const void* grads;
  Storage storage;
  const int32_t* order;  // sorted positions; null: each position stands at itself
  int32_t begin, end;
  int dim;
  float scale, clip;  // clip: factor of the clipped gradient

  __device__ float Sum(int d) const {
    float sum = 0.0f;
    for (int32_t p = begin; p < end; ++p) {
      const int64_t position = order == nullptr ? p : order[p];
      const float grad = LoadNumber(storage, grads, position * dim + d) * scale;
      sum = p == begin ? grad : sum + grad;
    }
    return sum;
  }
  __device__ float operator()(int d) const { return clip == 1.0f ? Sum(d) : Sum(d) * clip; }

  // Sum of squares, the same for all lanes of the row.
  __device__ float Squares(unsigned mask) const {
    float part = 0.0f;
    for (int d = threadIdx.x % kRowLanes; d < dim; d += kRowLanes) {
      const float x = (*this)(d);
      part += x * x;
    }
    for (int half = kRowLanes / 2; half > 0; half /= 2) part += __shfl_down_sync(mask, part, half, kRowLanes);
    return __shfl_sync(mask, part, 0, kRowLanes);
  }
  // The norm where float squares overflow or vanish.
  __device__ float NormInDouble() const {
    double sum = 0;
    for (int d = 0; d < dim; ++d) {
      const float x = (*this)(d);
      sum += static_cast<double>(x) * x;
    }
    return static_cast<float>(sqrt(sum));
  }
};

// Numbers of one row, float32 in between.
struct RowColumns {
  const RowLayout& layout;
  char* row;
  uint32_t version;

  __device__ float Load(int d) const { return LoadNumber(layout.storage, row, d); }
  __device__ void Store(float x, int d) const {
    StoreNumber(layout.storage, x, row, d, layout.stochastic, static_cast<uint32_t>(d), version);
  }
  __device__ float Slot(int k, int d) const {
    return LoadNumber(layout.slot_storage, row + layout.wide_offset, k * layout.dim + d);
  }
  __device__ void StoreSlot(float x, int k, int d) const {
    StoreNumber(layout.slot_storage, x, row + layout.wide_offset, k * layout.dim + d, layout.stochastic,
                static_cast<uint32_t>(layout.dim * (1 + k) + d), version);
  }
};

template <class R>
__device__ inline void UpdateColumn(bool form, const typename R::Numbers& by, float g, int d, const RowColumns& row) {
  float w = row.Load(d), slots[R::kSlots + 1];
  for (int k = 0; k < R::kSlots; ++k) slots[k] = row.Slot(k, d);
  if (form) {
    R::template Column<true>(by, g, w, slots);
  } else {
    R::template Column<false>(by, g, w, slots);
  }
  row.Store(w, d);
  for (int k = 0; k < R::kSlots; ++k) row.StoreSlot(slots[k], k, d);
}

// Rows of `handles`, whose gradients are the sorted positions [begin[u], begin[u + 1]); begin null: position u alone. A
// negative handle names no row. A row whose sum is not finite stays as it is; its u goes to left_out [*num_left_out], in
// any order, unless left_out is null.
template <class R>
FUSEDREC_KERNEL UpdateKernel(TableView table, const int64_t* __restrict__ handles, int64_t num_rows,
                             const int32_t* __restrict__ begin, GradientColumns grads, R rule, typename R::Numbers by,
                             bool leaves_rows, uint32_t version, int32_t* __restrict__ left_out,
                             unsigned* num_left_out) {
  const int64_t u = GlobalThread() / kRowLanes;
  if (u >= num_rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const unsigned mask = 0xffffu << (threadIdx.x & 16);
  if (handles[u] < 0) return;
  const uint32_t row = static_cast<uint32_t>(handles[u]);
  const StoredRow at = table.At(row);
  const RowColumns columns{at.layout, at.data, version};
  grads.begin = begin == nullptr ? static_cast<int32_t>(u) : begin[u];
  grads.end = begin == nullptr ? grads.begin + 1 : begin[u + 1];
  if (grads.begin == grads.end) return;  // of another part of the lookup
  bool is_finite = true;
  for (int d = lane; d < grads.dim; d += kRowLanes) is_finite = is_finite && IsFinite(grads.Sum(d));
  if (!__all_sync(mask, is_finite)) {
    if (lane == 0 && left_out != nullptr) left_out[atomicAdd(num_left_out, 1u)] = static_cast<int32_t>(u);
    return;
  }
  if (rule.clipnorm > 0) {
    const float squares = grads.Squares(mask);
    const bool plain = squares > kSmallestSquares && squares < kLargestSquares;
    const float norm = plain ? sqrtf(squares) : grads.NormInDouble();
    if (norm > rule.clipnorm) grads.clip = rule.clipnorm / norm;
  }
  if constexpr (R::kRowSlots > 0) {
    static_assert(R::kRowSlots == 1);
    float* const stored = reinterpret_cast<float*>(columns.row + at.layout.scalars_offset);
    float slot = *stored;
    by = rule.OfRow(by, grads.Squares(mask), grads.dim, &slot);
    __syncwarp(mask);
    if (lane == 0) *stored = slot;
  }
  if (lane == 0) table.Meta(row)->updated = version;
  if (leaves_rows) return;
  for (int d = lane; d < grads.dim; d += kRowLanes) UpdateColumn<R>(rule.form(), by, grads(d), d, columns);
}

// Checks of handles and of an inverse before a kernel follows them. In TensorFlow they are ordinary tensors, and an index
// out of range would end the process. The same pass tells whether gradients are finite.

constexpr unsigned kHandleBlocks = 132 * 4;  // of a loop that waits for memory alone

__device__ inline unsigned Smaller(unsigned a, unsigned b) { return a < b ? a : b; }

FUSEDREC_KERNEL HandleFactsKernel(TableView table, const int64_t* __restrict__ handles, int64_t num_handles,
                                  const int32_t* __restrict__ inverse, int64_t num_ids, int64_t num_rows, Numbers grads,
                                  const uint32_t* __restrict__ sum_of_row, uint32_t attempt, HandleFacts* facts) {
  unsigned oldest = ~0u, newest = ~0u;
  const bool trains = inverse != nullptr;  // an id that admission refused has the handle -1
  bool handles_are_sound = true, inverse_is_sound = true, grads_are_finite = true, all_have_sums = sum_of_row != nullptr;
  bool handles_are_distinct = true;
  const int64_t threads = GridThreads();
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

}  // namespace fusedrec::device_table
