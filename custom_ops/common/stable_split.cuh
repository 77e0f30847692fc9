// A stable counting sort of items into few bins, in three steps: count per tile, sum over tiles, place.
//
// The place of an item depends on its bin and on the items before it alone, so the result is the same on every run. Used
// to sort ids by owner (rank_partition) and, digit by digit, positions by row (recovery). `bin_of(n)` is a functor of
// the position; it must answer in [0, bins).
//
// Counts are laid out bin after bin, [bins, tiles], so that one block sums a bin's tiles.
#pragma once

#include "common/device.cuh"

namespace fusedrec {
namespace stable_split {

constexpr int kThreads = 256, kWarps = kThreads / 32, kItems = 8, kTile = kThreads * kItems;
constexpr int kMaxBins = 1024;  // counts of all warps of a block lie in shared memory

inline int64_t Tiles(int64_t items) { return (items + kTile - 1) / kTile; }
// Bytes of shared memory of CountTile and PlaceTile.
inline int SharedBytes(int64_t bins) { return static_cast<int>(kWarps * bins * sizeof(unsigned)); }

// Position of row k of the calling thread: a warp has positions side by side.
__device__ inline int64_t PositionOf(int64_t tile, int k) {
  return tile * kTile + Warp() * 32 * kItems + k * 32 + Lane();
}

// Counts the items of one warp into count[bins] and returns, for this thread's row k, how many of the warp's items
// before it are in the same bin. `bin` < 0: no item.
__device__ inline unsigned CountRow(int bin, unsigned* count) {
  const unsigned alike = __match_any_sync(kFullWarp, bin);
  const unsigned before = __popc(alike & LanesBefore());
  const unsigned seen = bin < 0 ? 0 : count[bin];
  __syncwarp();
  if (bin >= 0 && before == 0) count[bin] = seen + __popc(alike);
  __syncwarp();
  return seen + before;
}

__device__ inline void ClearCounts(unsigned* counts, int bins) {
  for (int i = threadIdx.x; i < kWarps * bins; i += kThreads) counts[i] = 0;
  __syncthreads();
}

// counts[bin, tile] of the items of this block's tile.
template <typename BinOf>
__device__ inline void CountTile(const BinOf& bin_of, int64_t items, int bins, int64_t tiles, unsigned* shared,
                                 unsigned* __restrict__ counts) {
  ClearCounts(shared, bins);
  const int64_t tile = blockIdx.x;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t n = PositionOf(tile, k);
    CountRow(n < items ? bin_of(n) : -1, shared + Warp() * bins);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    unsigned sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared[w * bins + bin];
    counts[bin * tiles + tile] = sum;
  }
}

// Calls place(n, bin, rank) for every item of this block's tile: rank counts the bin's items before it, over all tiles.
// `counts` as SumOverTilesKernel leaves them.
template <typename BinOf, typename Place>
__device__ inline void PlaceTile(const BinOf& bin_of, int64_t items, int bins, int64_t tiles, unsigned* shared,
                                 const unsigned* __restrict__ counts, const Place& place) {
  ClearCounts(shared, bins);
  const int64_t tile = blockIdx.x;
  int bin[kItems];
  unsigned rank[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t n = PositionOf(tile, k);
    bin[k] = n < items ? bin_of(n) : -1;
    rank[k] = CountRow(bin[k], shared + Warp() * bins);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += kThreads) {
    unsigned before = counts[b * tiles + tile];
    for (int w = 0; w < kWarps; ++w) {
      const unsigned count = shared[w * bins + b];
      shared[w * bins + b] = before;
      before += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (bin[k] >= 0) place(PositionOf(tile, k), bin[k], shared[Warp() * bins + bin[k]] + rank[k]);
  }
}

// Threads of a block that sums over tiles: a warp, where each of its lanes has at most one.
inline int SumThreads(int64_t tiles) { return tiles > 32 ? kThreads : 32; }

// One block of SumThreads per bin: counts become the bin's items before each tile; totals[bin] is their sum.
static __global__ void __launch_bounds__(kThreads)
    SumOverTilesKernel(int64_t tiles, unsigned* __restrict__ counts, unsigned* __restrict__ totals) {
  FUSEDREC_SHARED(unsigned, warp_sums, kWarps);
  unsigned* const own = counts + static_cast<int64_t>(blockIdx.x) * tiles;
  const int threads = static_cast<int>(blockDim.x);
  unsigned before = 0;
  for (int64_t base = 0; base < tiles; base += threads) {
    const int64_t t = base + threadIdx.x;
    const unsigned count = t < tiles ? own[t] : 0;
    unsigned until = WarpInclusiveSum(count);
    if (Lane() == 31) warp_sums[Warp()] = until;
    __syncthreads();
    unsigned all = 0;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < Warp()) until += warp_sums[w];
      all += warp_sums[w];
    }
    if (t < tiles) own[t] = before + until - count;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

}  // namespace stable_split
}  // namespace fusedrec
