// The functions of the CUDA runtime that launchers call, beside streams.h. Device memory is host memory.
#pragma once

#include <sched.h>

#include <cstdlib>

#include "emulation/scheduler.h"
#include "emulation/streams.h"

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = *emulation_last_error();
  *emulation_last_error() = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

namespace emulation {

// Arguments are values of the call, whenever the kernel runs.
template <typename Kernel, typename... Arguments>
void LaunchOn(void* stream, dim3 grid, dim3 block, size_t dynamic_bytes, const Kernel& kernel, Arguments... arguments) {
  Enqueue(stream, {[=] { Launch(grid, block, dynamic_bytes, [&] { kernel(arguments...); }); }, nullptr, nullptr});
}

inline int fault = 0;  // of tests/cuda/mutants.py, in sources that have them

}  // namespace emulation

extern "C" __attribute__((visibility("default"), weak)) void emulation_fault(int number) { emulation::fault = number; }
extern "C" __attribute__((visibility("default"), weak)) void emulation_options(int workers, double preempt,
                                                                               uint64_t seed) {
  emulation::options = {workers, preempt, seed};
}
