// The line between the kernel library (libfusedrec_cuda.so, nvcc) and the op library (g++): see device.cuh.
#ifndef FUSEDREC_COMMON_CUDA_API_H_
#define FUSEDREC_COMMON_CUDA_API_H_

#include <cstdint>

#define FUSEDREC_CUDA_API extern "C" __attribute__((visibility("default")))

namespace fusedrec {

// Answers of launchers; others are what CUDA says.
constexpr int kCudaSuccess = 0;
constexpr int kCudaInvalidValue = 1;  // cudaErrorInvalidValue: an argument is wrong, and no output is valid

}  // namespace fusedrec

// Name and meaning of an answer of a launcher; never null.
FUSEDREC_CUDA_API const char* fusedrec_cuda_error_string(int error);

// Copies `bytes` from device to host and waits for them, and so for all that was enqueued before.
FUSEDREC_CUDA_API int fusedrec_copy_to_host(void* host, const void* device, int64_t bytes, void* stream);

// Copies `bytes` from host to device and waits for them.
FUSEDREC_CUDA_API int fusedrec_copy_to_device(void* device, const void* host, int64_t bytes, void* stream);

// Makes `bytes` on the device 0.
FUSEDREC_CUDA_API int fusedrec_fill_zeros(void* device, int64_t bytes, void* stream);

#endif  // FUSEDREC_COMMON_CUDA_API_H_
