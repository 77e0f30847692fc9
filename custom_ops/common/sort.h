// A stable sort on the device. Equal keys keep their order, so the result is the same on every run.
#pragma once

#include <cstdint>

struct FusedrecAllocator;

namespace fusedrec {

// Enqueues a sort of `count` values by key; arrays on the device. Scratch comes from the allocator.
//
//   keys    [count], each at most `most`
//   values  [count]
//   sorted_keys, sorted_values  [count] out, other arrays
// Returns kCudaOutOfMemory, or an error of CUDA.
int SortByKey(const FusedrecAllocator* memory, const uint32_t* keys, const int32_t* values, int64_t count, uint32_t most,
              uint32_t* sorted_keys, int32_t* sorted_values, void* stream);

}  // namespace fusedrec
