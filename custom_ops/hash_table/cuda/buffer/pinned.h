// Page-locked host memory, which copies between host and device need not stage.
#pragma once

#include <cstdint>

#include "common/launcher.cuh"

namespace fusedrec {
namespace device_table {

class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* data() const { return data_; }
  // Makes it at least so large; its contents are then lost. The caller has waited for all copies.
  int Reserve(int64_t bytes) {
    if (bytes <= bytes_) return kCudaSuccess;
    const int64_t size = bytes + bytes / 4;  // batches differ a little
    void* larger = nullptr;
    const int answer = static_cast<int>(cudaMallocHost(&larger, size));
    if (answer != kCudaSuccess) {
      LastError();  // the next launch would answer it, too
      return answer;
    }
    if (data_ != nullptr) cudaFreeHost(data_);
    data_ = static_cast<char*>(larger);
    bytes_ = size;
    return kCudaSuccess;
  }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace device_table
}  // namespace fusedrec
