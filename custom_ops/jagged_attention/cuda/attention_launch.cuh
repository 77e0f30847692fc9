// Launches of jagged attention for one type of numbers: choice of the size, shared memory, grid.
#pragma once

#include "jagged_attention/cuda/attention_call.cuh"
#include "jagged_attention/cuda/jagged_attention_cuda.cuh"

namespace fusedrec {
namespace attention {

template <typename T, int D, Pass kPass>
int LaunchPass(const Problem<T>& problem, void* stream) {
  const int64_t work = problem.num_items * problem.heads;
  if (work == 0) return kCudaSuccess;
  SharedTiles<T, D> tiles;
  const int shared = tiles.Carve(nullptr, kPass != kForward, kPass == kKeyGrads, problem.bias);
  const auto kernel = AttentionKernel<T, D, kPass>;
  FUSEDREC_RETURN_IF_CUDA_ERROR(AskForShared(kernel, shared));
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
int Forward(const FusedrecAttention& call, const DeviceArrays& at, void* stream) {
  return LaunchSize<T, kForward>(ProblemOf<T>(call, at, false), stream);
}

template <typename T>
int Backward(const FusedrecAttention& call, const DeviceArrays& at, void* stream) {
  const Problem<T> over_queries = ProblemOf<T>(call, at, false);
  if (call.gate != nullptr) FUSEDREC_RETURN_IF_CUDA_ERROR(LaunchGateGrads(over_queries.gate, stream));
  FUSEDREC_RETURN_IF_CUDA_ERROR((LaunchSize<T, kQueryGrads>(over_queries, stream)));
  return LaunchSize<T, kKeyGrads>(ProblemOf<T>(call, at, true), stream);
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
