// The C interface between libfusedrec_cuda.so (nvcc) and the op library (g++); device.cuh has its rules.
#pragma once

#include <cstdint>

#define FUSEDREC_CUDA_API extern "C" __attribute__((visibility("default")))

namespace fusedrec {

// Codes that launchers return; other codes are CUDA's.
constexpr int kCudaSuccess = 0;
constexpr int kCudaInvalidValue = 1;  // cudaErrorInvalidValue: an argument is wrong, and no output is valid
constexpr int kCudaOutOfMemory = 2;   // cudaErrorMemoryAllocation

}  // namespace fusedrec

extern "C" {

// Device memory, aligned to 256 bytes. allocate returns null when there is none. Released memory may serve work that is
// enqueued later, and no other.
struct FusedrecAllocator {
  void* context;
  void* (*allocate)(void* context, int64_t bytes);
  void (*release)(void* context, void* memory);
};
}

// Name and meaning of a launcher's code; never null.
FUSEDREC_CUDA_API const char* fusedrec_cuda_error_string(int error);

// Copies `bytes` from device to host. Waits for the copy, and so for all work enqueued before it.
FUSEDREC_CUDA_API int fusedrec_copy_to_host(void* host, const void* device, int64_t bytes, void* stream);

// Copies `bytes` from host to device and waits for them.
FUSEDREC_CUDA_API int fusedrec_copy_to_device(void* device, const void* host, int64_t bytes, void* stream);

// Sets `bytes` on the device to 0.
FUSEDREC_CUDA_API int fusedrec_fill_zeros(void* device, int64_t bytes, void* stream);
