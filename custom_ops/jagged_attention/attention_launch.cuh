// Launches of jagged attention for one type of numbers: choice of the size, shared memory, grid.
#ifndef FUSEDREC_JAGGED_ATTENTION_ATTENTION_LAUNCH_CUH_
#define FUSEDREC_JAGGED_ATTENTION_ATTENTION_LAUNCH_CUH_

#include <algorithm>

#include "common/launcher.cuh"
#include "jagged_attention/jagged_attention_cuda.cuh"
#include "jagged_attention/jagged_attention_cuda.h"

namespace fusedrec {
namespace attention {

// Rows of a tile, by type: the list of items needs it before the size of heads is known.
inline int RowsOf(int64_t type) { return type == kNumberFloat ? 32 : 64; }

// Blocks of the pass over keys, each of which has sums of its own for the bias.
inline int64_t SlotsOf(int64_t items) { return std::min(items, kAttentionSlots); }

// What the scratch of a call holds, on the device.
struct DeviceArrays {
  int64_t *row_splits, *num_targets, *thresholds;
  Item* items[2];  // rows of queries, and of keys
  int64_t num_items;
  float *position_slots, *time_slots;
};

template <typename T, int D, Pass kPass>
int LaunchPass(const Problem<T>& problem, void* stream) {
  const int64_t work = problem.num_items * problem.heads;
  if (work == 0) return kCudaSuccess;
  SharedTiles<T, D> tiles;
  const int shared = tiles.Carve(nullptr, kPass != kForward, kPass == kKeyGrads, problem.bias.num_thresholds);
  const auto kernel = AttentionKernel<T, D, kPass>;
  // More than every device allows has to be asked for.
  FUSEDREC_RETURN_IF_CUDA_ERROR(
      static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)));
  const int64_t blocks = kPass == kKeyGrads ? SlotsOf(work) : work;
  FUSEDREC_LAUNCH(kernel, static_cast<unsigned>(blocks), (Shape<T, D>::kThreads), shared, stream, problem);
  return LastError();
}

template <typename T, Pass kPass>
int LaunchSize(const Problem<T>& problem, void* stream) {
  const int dim = std::max(problem.qk_dim, problem.value_dim);
  if (dim <= 32) return LaunchPass<T, 32, kPass>(problem, stream);
  if (dim <= 64) return LaunchPass<T, 64, kPass>(problem, stream);
  if (dim <= 128) return LaunchPass<T, 128, kPass>(problem, stream);
  return LaunchPass<T, 256, kPass>(problem, stream);
}

template <typename T>
Problem<T> ProblemOf(const FusedrecAttention& call, const DeviceArrays& at) {
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
  const auto clamp = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, int64_t{1} << 30)); };
  problem.mask = {clamp(call.contextual_length), clamp(call.attention_window), clamp(call.min_full_length)};
  problem.bias.position = call.max_length > 0 ? call.position_weights : nullptr;
  problem.bias.max_length = static_cast<int>(call.max_length);
  problem.bias.thresholds = reinterpret_cast<const long long*>(at.thresholds);
  problem.bias.time_weights = call.time_weights;
  problem.bias.num_thresholds = static_cast<int>(call.num_thresholds);
  problem.asks = call.asks;
  problem.answers = call.answers;
  problem.out = static_cast<T*>(call.out);
  problem.grads = static_cast<const T*>(call.grads);
  problem.query_grads = static_cast<T*>(call.query_grads);
  problem.key_grads = static_cast<T*>(call.key_grads);
  problem.value_grads = static_cast<T*>(call.value_grads);
  problem.position_slots = at.position_slots;
  problem.time_slots = at.time_slots;
  problem.num_items = at.num_items;
  return problem;
}

template <typename T>
int Forward(const FusedrecAttention& call, const DeviceArrays& at, void* stream) {
  Problem<T> problem = ProblemOf<T>(call, at);
  problem.items = at.items[0];
  return LaunchSize<T, kForward>(problem, stream);
}

template <typename T>
int Backward(const FusedrecAttention& call, const DeviceArrays& at, void* stream) {
  Problem<T> problem = ProblemOf<T>(call, at);
  problem.items = at.items[0];
  FUSEDREC_RETURN_IF_CUDA_ERROR((LaunchSize<T, kQueryGrads>(problem, stream)));
  problem.items = at.items[1];
  return LaunchSize<T, kKeyGrads>(problem, stream);
}

// One source file each, so that they compile side by side.
extern template int Forward<float>(const FusedrecAttention&, const DeviceArrays&, void*);
extern template int Backward<float>(const FusedrecAttention&, const DeviceArrays&, void*);
extern template int Forward<Half>(const FusedrecAttention&, const DeviceArrays&, void*);
extern template int Backward<Half>(const FusedrecAttention&, const DeviceArrays&, void*);
extern template int Forward<Bfloat16>(const FusedrecAttention&, const DeviceArrays&, void*);
extern template int Backward<Bfloat16>(const FusedrecAttention&, const DeviceArrays&, void*);

}  // namespace attention
}  // namespace fusedrec

#endif  // FUSEDREC_JAGGED_ATTENTION_ATTENTION_LAUNCH_CUH_
