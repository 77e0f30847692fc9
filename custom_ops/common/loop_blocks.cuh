// Blocks of kernels whose threads loop, so that a launch covers work of any size.
#ifndef FUSEDREC_COMMON_LOOP_BLOCKS_CUH_
#define FUSEDREC_COMMON_LOOP_BLOCKS_CUH_

#include "common/device.cuh"

namespace fusedrec {

inline unsigned LoopBlocks(int64_t work, int threads) {
  constexpr unsigned kMostBlocks = 132 * 16;  // several waves of the largest device
  const int64_t blocks = (work + threads - 1) / threads;
  return blocks < 1 ? 1 : blocks < kMostBlocks ? static_cast<unsigned>(blocks) : kMostBlocks;
}

}  // namespace fusedrec

#endif  // FUSEDREC_COMMON_LOOP_BLOCKS_CUH_
