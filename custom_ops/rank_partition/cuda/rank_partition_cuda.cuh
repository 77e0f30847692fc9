// Kernels of rank partition; the idea stands in rank_partition_cuda.h.
#pragma once

#include "common/hash.h"
#include "common/stable_split.cuh"

namespace fusedrec {
namespace rank_partition {

using stable_split::kThreads;
using stable_split::kTile;

struct OwnerOf {
  const int64_t* __restrict__ ids;
  uint32_t ranks;
  int tfra;

  __device__ int operator()(int64_t u) const {
    return static_cast<int>(tfra != 0 ? TfraOwner(ids[u], ranks) : HashRangeOwner(ids[u], ranks));
  }
};

// counts[r, tile]; also the first id that does not fit its bits, as an unsigned minimum.
__global__ void __launch_bounds__(kThreads)
    RankPartitionCountKernel(OwnerOf owner_of, int64_t num_ids, int64_t tiles, int id_bits,
                             unsigned* __restrict__ counts, unsigned* misfit) {
  FUSEDREC_DYNAMIC_SHARED(shared);
  stable_split::CountTile(owner_of, num_ids, static_cast<int>(owner_of.ranks), tiles,
                          reinterpret_cast<unsigned*>(shared), counts);
  if (id_bits >= 64) return;
  for (int k = 0; k < stable_split::kItems; ++k) {
    const int64_t u = stable_split::PositionOf(blockIdx.x, k);
    if (u < num_ids && static_cast<uint64_t>(owner_of.ids[u]) >> id_bits != 0) {
      atomicMin(misfit, static_cast<unsigned>(u));
    }
  }
}

// rank_begin[r]: row of the first id of owner r, up to and with r = R. One block.
__global__ void __launch_bounds__(stable_split::kMaxBins)
    RankPartitionBeginsKernel(const unsigned* __restrict__ totals, int ranks, unsigned* __restrict__ rank_begin) {
  FUSEDREC_SHARED(unsigned, warp_sums, 32);
  const int r = threadIdx.x;
  const unsigned total = r < ranks ? totals[r] : 0;
  unsigned until = WarpInclusiveSum(total);
  if (Lane() == 31) warp_sums[Warp()] = until;
  __syncthreads();
  for (int w = 0; w < Warp(); ++w) until += warp_sums[w];
  if (r < ranks) rank_begin[r] = until - total;
  if (r == ranks - 1) rank_begin[ranks] = until;
}

// before[s, r]: ids of owner r before the bound splits[s]. A block per bound.
__global__ void __launch_bounds__(kThreads)
    RankPartitionBoundsKernel(OwnerOf owner_of, const int64_t* __restrict__ splits, int64_t num_ids, int64_t tiles,
                              const unsigned* __restrict__ counts, const unsigned* __restrict__ totals,
                              unsigned* __restrict__ before) {
  FUSEDREC_SHARED(unsigned, here, stable_split::kMaxBins);
  const int ranks = static_cast<int>(owner_of.ranks);
  const int64_t bound = splits[blockIdx.x], tile = bound / kTile;
  for (int r = threadIdx.x; r < ranks; r += kThreads) here[r] = 0;
  __syncthreads();
  for (int64_t u = tile * kTile + threadIdx.x; u < bound; u += kThreads) atomicAdd(&here[owner_of(u)], 1u);
  __syncthreads();
  for (int r = threadIdx.x; r < ranks; r += kThreads) {
    before[static_cast<int64_t>(blockIdx.x) * ranks + r] =
        bound == num_ids ? totals[r] : counts[r * tiles + tile] + here[r];
  }
}

__global__ void __launch_bounds__(kThreads)
    RankPartitionHeadersKernel(int64_t num_segments, int ranks, const unsigned* __restrict__ before,
                               const unsigned* __restrict__ rank_begin, int64_t* __restrict__ message) {
  const int64_t i = GlobalThread();
  if (i >= num_segments * ranks) return;
  const int64_t r = i / num_segments, s = i % num_segments;
  message[rank_begin[r] + r * num_segments + s] =
      static_cast<int64_t>(before[(s + 1) * ranks + r]) - before[s * ranks + r];
}

struct PlaceId {
  const int64_t* __restrict__ ids;
  const unsigned* __restrict__ rank_begin;
  int64_t num_segments;
  int64_t* __restrict__ message;
  int32_t* __restrict__ restore;

  __device__ void operator()(int64_t u, int r, unsigned rank) const {
    const unsigned row = rank_begin[r] + rank;
    restore[u] = static_cast<int32_t>(row);
    message[row + (r + 1) * num_segments] = ids[u];  // after the headers of owners 0 to r
  }
};

__global__ void __launch_bounds__(kThreads)
    RankPartitionPlaceKernel(OwnerOf owner_of, int64_t num_ids, int64_t tiles, const unsigned* __restrict__ counts,
                             PlaceId place) {
  FUSEDREC_DYNAMIC_SHARED(shared);
  stable_split::PlaceTile(owner_of, num_ids, static_cast<int>(owner_of.ranks), tiles,
                          reinterpret_cast<unsigned*>(shared), counts, place);
}

// headers[r, s] out of the blocks that begin at block_begin[r].
__global__ void __launch_bounds__(kThreads)
    MessageHeadersKernel(const int64_t* __restrict__ message, const int64_t* __restrict__ block_begin,
                         int64_t num_segments, int64_t num_ranks, int64_t* __restrict__ headers) {
  const int64_t i = GlobalThread();
  if (i < num_segments * num_ranks) headers[i] = message[block_begin[i / num_segments] + i % num_segments];
}

// Runs (r, s) of ids in order of arrival: run_begin [R * S + 1] in that order, run_to [R * S] in ids.
__global__ void __launch_bounds__(kThreads)
    UnpackMessageKernel(const int64_t* __restrict__ message, const int64_t* __restrict__ run_begin,
                        const int64_t* __restrict__ run_to, int64_t num_segments, int64_t num_runs, int64_t num_ids,
                        int64_t* __restrict__ ids, int32_t* __restrict__ position) {
  const int64_t v = GlobalThread();
  if (v >= num_ids) return;
  int64_t low = 0, high = num_runs - 1;
  while (low < high) {  // the last run that begins at v or before
    const int64_t middle = (low + high + 1) / 2;
    if (run_begin[middle] <= v) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t to = run_to[low] + v - run_begin[low];
  ids[to] = message[v + (low / num_segments + 1) * num_segments];
  position[v] = static_cast<int32_t>(to);
}

}  // namespace rank_partition
}  // namespace fusedrec
