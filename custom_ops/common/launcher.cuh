// Helpers of the launchers: they allocate scratch memory, and copy small arrays between host and device.
#pragma once

#ifndef __CUDACC_RTC__  // NVRTC compiles the kernels without the launchers (tests/cuda/test_cuda_12.py)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "common/cuda_api.h"
#include "common/device.cuh"
#include "common/try.h"

namespace fusedrec {

// Entries of an array of scratch memory, and where its address goes.
struct ScratchArray {
  template <typename T>
  ScratchArray(T** address, int64_t count)
      : address(address), bytes((count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256) {}
  void* address;  // of the pointer
  int64_t bytes;
};

// Gives arrays places from `at` on, each at a multiple of 256 bytes, in this order. Returns their bytes.
inline int64_t PlaceArrays(std::initializer_list<ScratchArray> arrays, char* at) {
  int64_t bytes = 0;
  for (const ScratchArray& array : arrays) {
    char* const place = at == nullptr ? nullptr : at + bytes;
    std::memcpy(array.address, &place, sizeof(place));
    bytes += array.bytes;
  }
  return bytes;
}

// Scratch memory of one call of a launcher, released at its end.
class ScratchMemory {
 public:
  explicit ScratchMemory(const FusedrecAllocator* from) : from_(*from) {}
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  ~ScratchMemory() {
    for (void* block : blocks_) from_.release(from_.context, block);
  }

  // Allocates arrays in one block, in this order: one fill may cover neighbours.
  int Take(std::initializer_list<ScratchArray> arrays) {
    const int64_t bytes = PlaceArrays(arrays, nullptr);
    auto* const at = static_cast<char*>(from_.allocate(from_.context, bytes < 256 ? 256 : bytes));
    if (at == nullptr) return kCudaOutOfMemory;
    blocks_.push_back(at);
    PlaceArrays(arrays, at);
    return kCudaSuccess;
  }

 private:
  const FusedrecAllocator from_;
  std::vector<void*> blocks_;
};

inline int64_t BytesBetween(const void* first, const void* end) {
  return static_cast<const char*>(end) - static_cast<const char*>(first);
}

template <typename T>
int Copy(T* to, const T* from, int64_t count, cudaMemcpyKind how, void* stream) {
  if (count == 0) return kCudaSuccess;
  return static_cast<int>(cudaMemcpyAsync(to, from, count * sizeof(T), how, static_cast<cudaStream_t>(stream)));
}
template <typename T>
int CopyToDevice(T* device, const T* host, int64_t count, void* stream) {
  return Copy(device, host, count, cudaMemcpyHostToDevice, stream);
}
template <typename T>
int CopyOnDevice(T* to, const T* from, int64_t count, void* stream) {
  return Copy(to, from, count, cudaMemcpyDeviceToDevice, stream);
}
// Waits for the copy, and so for everything before it on the stream.
template <typename T>
int CopyToHost(T* host, const T* device, int64_t count, void* stream) {
  FUSEDREC_TRY(Copy(host, device, count, cudaMemcpyDeviceToHost, stream));
  return static_cast<int>(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

inline int Fill(void* device, int byte, int64_t bytes, void* stream) {
  if (bytes == 0) return kCudaSuccess;
  return static_cast<int>(cudaMemsetAsync(device, byte, bytes, static_cast<cudaStream_t>(stream)));
}

inline int LastError() { return static_cast<int>(cudaGetLastError()); }

}  // namespace fusedrec
#endif
