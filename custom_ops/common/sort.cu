#include "common/sort.cuh"

// CUB in this source alone, because it takes seconds to compile.
#ifdef FUSEDREC_EMULATION
#include <algorithm>
#else
#include <cub/device/device_radix_sort.cuh>
#endif

namespace fusedrec {
namespace {

FUSEDREC_KERNEL PositionsKernel(int64_t count, int32_t* __restrict__ positions) {
  const int64_t n = GlobalThread();
  if (n < count) positions[n] = static_cast<int32_t>(n);
}

FUSEDREC_KERNEL RowKeysKernel(const int32_t* __restrict__ index, int64_t count, uint32_t num_rows,
                              uint32_t* __restrict__ keys) {
  const int64_t n = GlobalThread();
  if (n >= count) return;
  const uint32_t row = static_cast<uint32_t>(index[n]);
  keys[n] = row < num_rows ? row : num_rows;
}

// As cub::DeviceRadixSort::SortPairs: with null memory it only counts its bytes.
int SortPairs(void* memory, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
              int32_t* sorted_values, int64_t count, int bits, void* stream) {
#ifdef FUSEDREC_EMULATION
  bytes = 1;
  const auto sort = [=] {
    for (int64_t i = 0; i < count; ++i) sorted_values[i] = static_cast<int32_t>(i);
    const auto key_of = [&](int32_t n) { return keys[n] & (bits < 32 ? (1u << bits) - 1 : ~0u); };
    std::stable_sort(sorted_values, sorted_values + count, [&](int32_t a, int32_t b) { return key_of(a) < key_of(b); });
    for (int64_t i = 0; i < count; ++i) {
      sorted_keys[i] = keys[sorted_values[i]];
      sorted_values[i] = values[sorted_values[i]];
    }
  };
  if (memory != nullptr) emulation::Enqueue(stream, {sort, nullptr, nullptr});
  return kCudaSuccess;
#else
  return static_cast<int>(cub::DeviceRadixSort::SortPairs(memory, bytes, keys, sorted_keys, values, sorted_values, count,
                                                          0, bits, static_cast<cudaStream_t>(stream)));
#endif
}

}  // namespace

int PositionSort::Take(int64_t count, ScratchMemory* scratch) {
  count_ = count;
  FUSEDREC_TRY(SortPairs(nullptr, bytes_, keys_, sorted_keys_, positions_, sorted_positions_, count, 32, nullptr));
  return scratch->Take({{&keys_, count}, {&sorted_keys_, count}, {&positions_, count}, {&sorted_positions_, count},
                        {&memory_, static_cast<int64_t>(bytes_)}});
}

int PositionSort::ByKey(uint32_t most, Sorted* sorted, void* stream) const {
  *sorted = {sorted_keys_, sorted_positions_};
  if (count_ == 0) return kCudaSuccess;
  int bits = 1;
  while (bits < 32 && most >> bits != 0) ++bits;
  FUSEDREC_FOR_EACH(PositionsKernel, count_, stream, count_, positions_);
  size_t bytes = bytes_;
  return SortPairs(memory_, bytes, keys_, sorted_keys_, positions_, sorted_positions_, count_, bits, stream);
}

int PositionSort::ByRow(const int32_t* index, int64_t num_rows, Sorted* sorted, void* stream) const {
  FUSEDREC_FOR_EACH(RowKeysKernel, count_, stream, index, count_, static_cast<uint32_t>(num_rows), keys_);
  return ByKey(static_cast<uint32_t>(num_rows), sorted, stream);
}

}  // namespace fusedrec
