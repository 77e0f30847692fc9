// Launches of a call for one type of numbers: choice of the size, shared memory, grid.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/launcher.cuh"
#include "jagged_attention/cuda/attention_channels.cuh"
#include "jagged_attention/cuda/jagged_attention_cuda.cuh"

namespace fusedrec::attention {

// Channels have the columns of all heads in slices of this many.
constexpr int kSmallSlice = 64, kLargeSlice = 128;

inline int64_t SliceColumns(const AttentionCall<void>& call) {
  return call.heads * call.value_dim <= kSmallSlice ? kSmallSlice : kLargeSlice;
}

// Launches a kernel over `blocks`. Shared memory beyond what every device allows has to be asked for.
template <typename T, typename Kernel>
int LaunchBlocks(Kernel kernel, int64_t blocks, int threads, int shared, const Problem<T>& problem, void* stream) {
  if (blocks == 0) return kCudaSuccess;
  FUSEDREC_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  FUSEDREC_LAUNCH(kernel, static_cast<unsigned>(blocks), threads, shared, stream, problem);
  return LastError();
}

template <typename T, int D, Pass kPass>
int LaunchPass(const Problem<T>& problem, void* stream) {
  constexpr bool kKeyRows = kPass == kKeyGrads;
  const int shared = SharedTiles<T, D>().Carve(nullptr, kPass != kForward, kKeyRows, problem.bias);
  const int64_t blocks = kKeyRows ? problem.slots : problem.num_items[0] * problem.heads;
  return LaunchBlocks(AttentionKernel<T, D, kPass>, blocks, Shape<T, D>::kThreads, shared, problem, stream);
}

template <typename T, Pass kPass>
int LaunchSize(const Problem<T>& problem, void* stream) {
  const int64_t dim = std::max(problem.qk_dim, problem.value_dim);
  if (dim <= 32) return LaunchPass<T, 32, kPass>(problem, stream);
  if (dim <= 64) return LaunchPass<T, 64, kPass>(problem, stream);
  if (dim <= 128) return LaunchPass<T, 128, kPass>(problem, stream);
  return LaunchPass<T, 256, kPass>(problem, stream);
}

template <typename T, int D>
int LaunchChannels(const Problem<T>& problem, bool backward, void* stream) {
  const int shared = ChannelTiles<T, D>().Carve(nullptr, backward, problem.bias);
  const int64_t blocks = backward ? problem.slots : problem.num_items[0] * problem.slices;
  return LaunchBlocks(backward ? ChannelGradsKernel<T, D> : ChannelsKernel<T, D>, blocks, Shape<T, D>::kThreads, shared,
                      problem, stream);
}

// Makes the gradients of the gate and of the attention, and the sums for the norm's weights.
template <typename T>
int LaunchGateGrads(const Problem<T>& problem, void* stream) {
  const int64_t columns = problem.heads * problem.value_dim, groups = problem.queries * (problem.per_head ? problem.heads : 1);
  if (columns == 0) return kCudaSuccess;
  FUSEDREC_FOR_EACH(GateGradsKernel<T>, groups * 32, stream, problem);
  if (problem.norm_weight != nullptr) FUSEDREC_FOR_EACH(NormGradsKernel<T>, problem.gate_slots * columns, stream, problem);
  return LastError();
}

template <typename T>
int Run(const Problem<void>& call, bool backward, void* stream) {
  Problem<T> problem;
  static_assert(sizeof(problem) == sizeof(call));
  std::memcpy(static_cast<void*>(&problem), &call, sizeof(call));
  if (problem.channels > 0) {
    if (SliceColumns(call) == kSmallSlice) return LaunchChannels<T, kSmallSlice>(problem, backward, stream);
    return LaunchChannels<T, kLargeSlice>(problem, backward, stream);
  }
  if (!backward) return LaunchSize<T, kForward>(problem, stream);
  if (problem.gate != nullptr) {
    FUSEDREC_TRY(LaunchGateGrads(problem, stream));
    problem.grads = problem.attended_grads;
  }
  FUSEDREC_TRY((LaunchSize<T, kQueryGrads>(problem, stream)));
  return LaunchSize<T, kKeyGrads>(problem, stream);
}

// One source file each, so that they compile side by side.
extern template int Run<float>(const Problem<void>&, bool, void*);
extern template int Run<Half>(const Problem<void>&, bool, void*);
extern template int Run<Bfloat16>(const Problem<void>&, bool, void*);

}  // namespace fusedrec::attention
