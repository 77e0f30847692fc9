#include "common/sort.h"

#include "common/launcher.cuh"

// CUB in this source alone, because it takes seconds to compile.
#ifdef FUSEDREC_EMULATION
#include <algorithm>
#include <numeric>
#else
#include <cub/device/device_radix_sort.cuh>
#endif

namespace fusedrec {

#ifdef FUSEDREC_EMULATION
int SortByKey(const FusedrecAllocator*, const uint32_t* keys, const int32_t* values, int64_t count, uint32_t most,
              uint32_t* sorted_keys, int32_t* sorted_values, void* stream) {
  emulation::Enqueue(stream, {[=] {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
    for (int64_t i = 0; i < count; ++i) {
      if (keys[order[i]] > most) std::abort();  // CUB would compare the bits of `most` only
      sorted_keys[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
  }, nullptr, nullptr});
  return kCudaSuccess;
}
#else
int SortByKey(const FusedrecAllocator* memory, const uint32_t* keys, const int32_t* values, int64_t count, uint32_t most,
              uint32_t* sorted_keys, int32_t* sorted_values, void* stream) {
  int bits = 1;
  while (bits < 32 && most >> bits != 0) ++bits;
  size_t bytes = 0;
  char* scratch = nullptr;
  const auto sort = [&] {
    return static_cast<int>(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values,
                                                            count, 0, bits, static_cast<cudaStream_t>(stream)));
  };
  FUSEDREC_RETURN_IF_CUDA_ERROR(sort());  // without scratch it only counts `bytes`
  ScratchMemory of_sort(memory);
  FUSEDREC_RETURN_IF_CUDA_ERROR(of_sort.Take({{&scratch, static_cast<int64_t>(bytes)}}));
  return sort();
}
#endif

}  // namespace fusedrec
