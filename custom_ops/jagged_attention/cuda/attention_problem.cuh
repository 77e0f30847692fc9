// A call of attention, as its kernels see it.
#pragma once

#include "jagged_attention/cuda/attention_gate.cuh"
#include "jagged_attention/cuda/attention_pairs.cuh"

namespace fusedrec {
namespace attention {

// Rows of a tile that a block owns: places from `begin` on of sequence `row`.
struct Item {
  int row, begin;
};

// One call, for kernels. As FusedrecAttention, with all arrays on the device.
template <typename T>
struct Problem {
  int64_t heads;
  int qk_dim, value_dim;
  float alpha;
  const T *query, *key, *value;
  const float* scale;
  int64_t scale_stride;
  const int64_t *row_splits, *num_targets, *contextual_lengths, *query_splits;  // the last three: null without
  MaskOptions mask;
  PairDropout dropout;
  BiasTables bias;  // of device memory
  const int64_t *asks, *answers;
  T* out;
  const T* grads;
  T *query_grads, *key_grads, *value_grads;
  int num_time_weights;                // J+1, or the parameters of a function
  float *position_slots, *time_slots;  // [slots, 2N-1], [slots, num_time_weights]: sums of each block
  const Item* items;
  int64_t num_items;
  OutputGate<T> gate;
  int64_t slices;  // of the columns of all heads (attention_channels.cuh)

  __device__ bool has_bias() const { return bias.position != nullptr || bias.has_time(); }
  // The channels are position, then time; either may be missing.
  __device__ int channels() const { return (bias.position != nullptr ? 1 : 0) + (bias.has_time() ? 1 : 0); }
  __device__ bool IsPosition(int channel) const { return channel == 0 && bias.position != nullptr; }

  // The place of the row's first query.
  __device__ int FirstQuery(int row) const {
    if (query_splits == nullptr) return 0;
    return static_cast<int>(row_splits[row + 1] - row_splits[row] - (query_splits[row + 1] - query_splits[row]));
  }
  // Place p of a row is number QueryStart + p among the query tokens.
  __device__ int64_t QueryStart(int row) const {
    return query_splits == nullptr ? row_splits[row] : query_splits[row] - FirstQuery(row);
  }

  __device__ RowMask MaskOfRow(int row) const {
    return MaskOf(mask, row_splits[row + 1] - row_splits[row], num_targets == nullptr ? 0 : num_targets[row],
                  contextual_lengths == nullptr ? 0 : contextual_lengths[row]);
  }
};

}  // namespace attention
}  // namespace fusedrec
