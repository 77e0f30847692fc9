// Stable sorts on the device. Equal keys keep their order, so the result is the same on every run.
#pragma once

#include "common/device.cuh"
#include "common/launcher.cuh"

namespace fusedrec {

struct Sorted {
  const uint32_t* keys;
  const int32_t* positions;  // of each key before the sort
};

#ifndef __CUDACC_RTC__
// Sorts positions [0, count) by key. The result lives as long as the scratch memory.
class PositionSort {
 public:
  // Answers kCudaOutOfMemory, or an error of CUDA.
  int Take(int64_t count, ScratchMemory* scratch);

  // [count], device; written by the caller before ByKey.
  uint32_t* keys() const { return keys_; }
  // Enqueues the sort; each key is at most `most`.
  int ByKey(uint32_t most, Sorted* sorted, void* stream) const;
  // The same by row, index[n] of position n: device. A row outside [0, num_rows) has the key num_rows.
  int ByRow(const int32_t* index, int64_t num_rows, Sorted* sorted, void* stream) const;

 private:
  int64_t count_ = 0;
  uint32_t *keys_ = nullptr, *sorted_keys_ = nullptr;
  int32_t *positions_ = nullptr, *sorted_positions_ = nullptr;
  char* memory_ = nullptr;  // of the library's sort
  size_t bytes_ = 0;
};
#endif

}  // namespace fusedrec
