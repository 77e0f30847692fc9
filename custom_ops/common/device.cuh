// The interface that device code uses: CUDA, or its emulation on the CPU in tests (tests/cuda/emulation).
//
// Device code keeps to what both have: launches through FUSEDREC_LAUNCH, shared memory through FUSEDREC_SHARED, words
// that other threads change while they are read through LoadFresh and StoreFresh. No cooperative groups; CUB in sort.cu
// alone.
//
// # Launchers
// `extern "C"`, raw pointers, sizes, `void* stream` last; the answer is 0, or a cudaError_t. No TensorFlow type and no
// CUDA type crosses that line. The op library is compiled without CUDA, and a test drives the same library through
// ctypes. Scratch comes from the caller's FusedrecAllocator (launcher.cuh).
#pragma once

#include <cstdint>

#ifdef FUSEDREC_EMULATION
#include "emulation/cuda_emulation.h"
#else
#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif
#define FUSEDREC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define FUSEDREC_SHARED(type, name, count) __shared__ type name[count]
#define FUSEDREC_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// A kernel with blocks of kThreads threads.
#define FUSEDREC_KERNEL [[maybe_unused]] static __global__ void __launch_bounds__(kThreads)
// Launches it with a thread for each of `count` items, if there are any; or with threads that loop over them.
#define FUSEDREC_FOR_EACH(kernel, count, stream, ...) FUSEDREC_LAUNCH_OVER(BlocksFor, kernel, count, stream, __VA_ARGS__)
#define FUSEDREC_LOOP(kernel, count, stream, ...) FUSEDREC_LAUNCH_OVER(LoopBlocks, kernel, count, stream, __VA_ARGS__)
#define FUSEDREC_LAUNCH_OVER(blocks, kernel, count, stream, ...)                                    \
  do {                                                                                              \
    const int64_t fusedrec_count = (count);                                                         \
    if (fusedrec_count <= 0) break;                                                                 \
    FUSEDREC_LAUNCH(kernel, blocks(fusedrec_count, kThreads), kThreads, 0, stream, __VA_ARGS__);    \
  } while (false)

namespace fusedrec {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kThreads = 256, kWarps = kThreads / 32;  // of a block

__device__ inline int Lane() { return static_cast<int>(threadIdx.x & 31); }
__device__ inline int Warp() { return static_cast<int>(threadIdx.x >> 5); }
__device__ inline unsigned LanesBefore() { return (1u << (threadIdx.x & 31)) - 1; }
__device__ inline int64_t GlobalThread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t GridThreads() { return static_cast<int64_t>(gridDim.x) * kThreads; }

#ifndef FUSEDREC_EMULATION
// A word that other threads change: neither kept in a register nor in the cache of one multiprocessor.
template <typename T>
__device__ inline T LoadFresh(const T* p) {
  return *static_cast<const volatile T*>(p);
}
template <typename T>
__device__ inline void StoreFresh(T* p, T value) {
  *static_cast<volatile T*>(p) = value;
}
// A spinning thread lets others go first.
__device__ inline void Backoff() { __nanosleep(32); }
#endif

template <typename T>
__device__ inline T WarpSum(T value) {
  for (int d = 16; d > 0; d >>= 1) value += __shfl_xor_sync(kFullWarp, value, d);
  return value;
}

// Sum of the lanes up to and with this one.
template <typename T>
__device__ inline T WarpInclusiveSum(T value) {
  for (int d = 1; d < 32; d <<= 1) {
    const T other = __shfl_up_sync(kFullWarp, value, d);
    if (Lane() >= d) value += other;
  }
  return value;
}

// Blocks of `threads` threads for `work` threads; at least one.
inline unsigned BlocksFor(int64_t work, int threads) {
  const int64_t blocks = (work + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks);
}

// Blocks of a kernel whose threads loop, so that a launch covers work of any size.
inline unsigned LoopBlocks(int64_t work, int threads) {
  constexpr unsigned kMostBlocks = 132 * 16;  // several waves of the largest device
  const unsigned blocks = BlocksFor(work, threads);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace fusedrec
