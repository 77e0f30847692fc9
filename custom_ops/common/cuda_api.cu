#include "common/cuda_api.h"

#include "common/launcher.cuh"

const char* fusedrec_cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int fusedrec_copy_to_host(void* host, const void* device, int64_t bytes, void* stream) {
  return fusedrec::CopyToHost(static_cast<char*>(host), static_cast<const char*>(device), bytes, stream);
}

int fusedrec_copy_to_device(void* device, const void* host, int64_t bytes, void* stream) {
  const int answer = fusedrec::CopyToDevice(static_cast<char*>(device), static_cast<const char*>(host), bytes, stream);
  return answer != 0 ? answer : static_cast<int>(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

int fusedrec_fill_zeros(void* device, int64_t bytes, void* stream) { return fusedrec::Fill(device, 0, bytes, stream); }
