// CUDA on the CPU, for tests of kernels where there is no GPU: the same .cu files, compiled by g++.
//
// It shows wrong indices (AddressSanitizer underneath, each array of shared memory on its own), shared memory read
// before it is written, barriers that are missing or not reached by all, collectives of a warp that diverge, races
// between atomic operations (random schedules, several threads of the machine), and missing events between streams,
// when their work is deferred (streams.h). It cannot show missing fences on hardware with weakly ordered memory, data
// races between plain accesses that no schedule here causes, or time. compute-sanitizer and a GPU (tests/gpu) test these.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#include "emulation/runtime.h"
#include "emulation/meetings.h"
#include "emulation/intrinsics.h"

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define threadIdx (emulation::now->current->index)
#define blockIdx (emulation::now->index)
#define blockDim (emulation::now->block)
#define gridDim (emulation::now->grid)

#define FUSEDREC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  emulation::LaunchOn((stream), (grid), (block), (shared_bytes), [=](const auto&... arguments) { kernel(arguments...); }, \
                      __VA_ARGS__)
#define FUSEDREC_SHARED(type, name, count) \
  static char name##_key;                  \
  type* const name = static_cast<type*>(emulation::Shared(&name##_key, sizeof(type) * (count)))
#define FUSEDREC_DYNAMIC_SHARED(name) \
  unsigned char* const name = reinterpret_cast<unsigned char*>(emulation::now->dynamic_shared.get())
