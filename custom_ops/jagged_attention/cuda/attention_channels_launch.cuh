// Launches of the channels of FuXi for one type of numbers.
#pragma once

#include "jagged_attention/cuda/attention_call.cuh"
#include "jagged_attention/cuda/attention_channels.cuh"

namespace fusedrec {
namespace attention {

template <typename T, int D>
int LaunchChannels(const Problem<T>& problem, bool backward, void* stream) {
  const int64_t work = problem.num_items * problem.slices;
  if (work == 0) return kCudaSuccess;
  ChannelTiles<T, D> tiles;
  const int shared = tiles.Carve(nullptr, backward, problem.bias);
  const auto kernel = backward ? ChannelGradsKernel<T, D> : ChannelsKernel<T, D>;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AskForShared(kernel, shared));
  const int64_t blocks = backward ? SlotsOf(work) : work;
  FUSEDREC_LAUNCH(kernel, static_cast<unsigned>(blocks), (Shape<T, D>::kThreads), shared, stream, problem);
  return LastError();
}

template <typename T>
int Channels(const FusedrecAttention& call, const DeviceArrays& at, bool backward, void* stream) {
  Problem<T> problem = ProblemOf<T>(call, at, backward);
  problem.slices = SlicesOf(call);
  if (SliceColumns(call) == kSmallSlice) return LaunchChannels<T, kSmallSlice>(problem, backward, stream);
  return LaunchChannels<T, kLargeSlice>(problem, backward, stream);
}

// One source file each, so that they compile side by side.
extern template int Channels<float>(const FusedrecAttention&, const DeviceArrays&, bool, void*);
extern template int Channels<Half>(const FusedrecAttention&, const DeviceArrays&, bool, void*);
extern template int Channels<Bfloat16>(const FusedrecAttention&, const DeviceArrays&, bool, void*);

}  // namespace attention
}  // namespace fusedrec
