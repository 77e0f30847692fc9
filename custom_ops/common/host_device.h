// Functions that the CPU and the GPU share, bit for bit.
#pragma once

#if defined(__CUDACC__)
#define FUSEDREC_HOST_DEVICE __host__ __device__
#else
#define FUSEDREC_HOST_DEVICE
#endif

namespace fusedrec {

// The last i in [low, high] with begin(i) <= n, where begin does not decrease and begin(low) <= n.
template <typename Begin, typename Number>
FUSEDREC_HOST_DEVICE inline Number LastBegun(const Begin& begin, Number low, Number high, Number n) {
  while (low < high) {
    const Number middle = (low + high + 1) / 2;
    if (begin(middle) <= n) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace fusedrec
