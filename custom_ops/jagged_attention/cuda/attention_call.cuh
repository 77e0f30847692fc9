// A call of attention, as the host side of a launch sees it.
#pragma once

#include <algorithm>

#include "common/launcher.cuh"
#include "common/number.cuh"
#include "jagged_attention/cuda/attention_gate_launch.cuh"
#include "jagged_attention/cuda/attention_problem.cuh"
#include "jagged_attention/cuda/jagged_attention_cuda.h"

namespace fusedrec {
namespace attention {

// Rows of a tile, by type: the list of items needs it before the size of heads is known.
inline int RowsOf(int64_t type) { return type == kNumberFloat ? 32 : 64; }

// Blocks of the pass over keys, each of which has sums of its own for the bias.
inline int64_t SlotsOf(int64_t items) { return std::min(items, kAttentionSlots); }

// Channels have the columns of all heads in slices of this many.
constexpr int kSmallSlice = 64, kLargeSlice = 128;

inline int64_t SliceColumns(const FusedrecAttention& call) {
  return call.heads * call.value_dim <= kSmallSlice ? kSmallSlice : kLargeSlice;
}

inline int64_t SlicesOf(const FusedrecAttention& call) {
  return (call.heads * call.value_dim + SliceColumns(call) - 1) / SliceColumns(call);
}

// Entries of time_weights: one per bucket, or the parameters of the function.
inline int64_t NumTimeWeights(const FusedrecAttention& call) {
  if (call.time_function == kNoFunction) return call.num_thresholds + 1;
  return call.time_function == kStretched ? 3 : 2;
}

// Shared memory of a kernel. More than every device allows has to be asked for.
template <typename Kernel>
int AskForShared(Kernel kernel, int bytes) {
  return static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// The scratch of a call, on the device.
struct DeviceArrays {
  int64_t *row_splits, *num_targets, *contextual_lengths, *query_splits, *thresholds;
  Item* items[2];  // rows of queries, and of keys
  int64_t num_items[2];
  float *position_slots, *time_slots;
  GateArrays gate;
};

// over_keys: whether the blocks own rows of keys, or rows of queries.
template <typename T>
Problem<T> ProblemOf(const FusedrecAttention& call, const DeviceArrays& at, bool over_keys) {
  Problem<T> problem{};
  problem.heads = call.heads;
  problem.qk_dim = static_cast<int>(call.qk_dim);
  problem.value_dim = static_cast<int>(call.value_dim);
  problem.alpha = static_cast<float>(call.alpha);
  problem.query = static_cast<const T*>(call.query);
  problem.key = static_cast<const T*>(call.key);
  problem.value = static_cast<const T*>(call.value);
  problem.scale = call.scale;
  problem.scale_stride = call.scale_stride;
  problem.row_splits = at.row_splits;
  problem.num_targets = call.num_targets == nullptr ? nullptr : at.num_targets;
  problem.contextual_lengths = call.contextual_lengths == nullptr ? nullptr : at.contextual_lengths;
  problem.query_splits = call.query_splits == nullptr ? nullptr : at.query_splits;
  const auto clamp = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, int64_t{1} << 30)); };
  problem.mask = {clamp(call.target_group_size), clamp(call.attention_window), clamp(call.min_full_length),
                  clamp(call.global_window)};
  problem.dropout = {static_cast<unsigned>(call.dropped), static_cast<unsigned>(call.pair_seed)};
  problem.bias.position = call.max_length > 0 ? call.position_weights : nullptr;
  problem.bias.max_length = static_cast<int>(call.max_length);
  problem.bias.thresholds = reinterpret_cast<const long long*>(at.thresholds);
  problem.bias.time_weights = call.time_weights;
  problem.bias.num_thresholds = static_cast<int>(call.num_thresholds);
  problem.bias.function = static_cast<TimeKind>(call.time_function);
  problem.num_time_weights = static_cast<int>(NumTimeWeights(call));
  problem.asks = call.asks;
  problem.answers = call.answers;
  problem.out = static_cast<T*>(call.out);
  problem.gate = GateOf<T>(call, at.gate);
  problem.grads = call.gate == nullptr ? static_cast<const T*>(call.grads) : problem.gate.attended_grads;
  problem.query_grads = static_cast<T*>(call.query_grads);
  problem.key_grads = static_cast<T*>(call.key_grads);
  problem.value_grads = static_cast<T*>(call.value_grads);
  problem.position_slots = at.position_slots;
  problem.time_slots = at.time_slots;
  problem.items = at.items[over_keys ? 1 : 0];
  problem.num_items = at.num_items[over_keys ? 1 : 0];
  return problem;
}

}  // namespace attention
}  // namespace fusedrec
