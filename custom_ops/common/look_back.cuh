// A running total across blocks in a single pass: each block adds what its predecessors have published.
//
// Source: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back" (2016). A block publishes its
// own sum, then the total up to its end. A later block adds sums backwards until it meets a total. A state is one
// 64-bit word, status and value together, so that no fence is needed between them.
//
// Blocks take their tile by a counter and not by their index, so every block that another waits for has started. That
// costs one atomic operation per tile of some thousand items.
#pragma once

#include "common/device.cuh"

namespace fusedrec {

// A state of all ones says nothing yet, so one fill of scratch with ones prepares states, counters and slots alike.
constexpr unsigned long long kNoState = ~0ull;
constexpr unsigned long long kSumOfTile = 1ull << 32, kTotal = 2ull << 32;

// Tile of this block; `next_tile` begins with all ones. All threads of the block call it.
__device__ inline unsigned TakeTile(unsigned* next_tile) {
  FUSEDREC_SHARED(unsigned, tile, 1);
  if (threadIdx.x == 0) tile[0] = atomicAdd(next_tile, 1u) + 1u;
  __syncthreads();
  return tile[0];
}

// Total of all tiles before this one. One whole warp calls it, with the sum of the tile.
__device__ inline unsigned LookBack(unsigned long long* states, unsigned tile, unsigned sum) {
  const int lane = Lane();
  if (tile > 0 && lane == 0) StoreFresh(&states[tile], kSumOfTile | sum);
  unsigned before = 0;
  for (int64_t newest = static_cast<int64_t>(tile) - 1; newest >= 0; newest -= 32) {
    const int64_t mine = newest - lane;
    unsigned long long state = kTotal;  // before the first tile
    if (mine >= 0) {
      while ((state = LoadFresh(&states[mine])) == kNoState) Backoff();
    }
    __syncwarp();
    const unsigned totals = __ballot_sync(kFullWarp, (state & kTotal) != 0);
    // The first total contains the values of the lanes after it, so these add nothing.
    const int last = totals != 0 ? __ffs(static_cast<int>(totals)) - 1 : 31;
    before += WarpSum(lane <= last ? static_cast<unsigned>(state) : 0u);
    if (totals != 0) break;
  }
  if (lane == 0) StoreFresh(&states[tile], kTotal | (before + sum));
  return before;
}

}  // namespace fusedrec
