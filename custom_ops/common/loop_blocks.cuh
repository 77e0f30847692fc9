// Blocks of kernels whose threads loop, so that a launch covers work of any size.
#pragma once

#include "common/device.cuh"

namespace fusedrec {

inline unsigned LoopBlocks(int64_t work, int threads) {
  constexpr unsigned kMostBlocks = 132 * 16;  // several waves of the largest device
  const int64_t blocks = (work + threads - 1) / threads;
  return blocks < 1 ? 1 : blocks < kMostBlocks ? static_cast<unsigned>(blocks) : kMostBlocks;
}

}  // namespace fusedrec
