// Kernels that find rows: the rows of a segment that its policy ranks lowest (select.cuh says how), and rows by their ids.
#pragma once

#include "hash_table/cuda/select.cuh"

namespace fusedrec {
namespace device_table {

struct Search {
  Score found;               // its bytes so far
  unsigned long long count;  // of the rows that agree with them, this many are not above
};

// bins [256]: rows that may leave and agree with the bytes found so far, by their next byte.
static __global__ void __launch_bounds__(kSelectThreads)
    CountBytesKernel(TableView table, int64_t num_rows, MayLeave may_leave, const Search* search, int byte,
                     unsigned* bins) {
  FUSEDREC_SHARED(unsigned, own, 256);
  own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t row = GlobalThread(); row < num_rows; row += static_cast<int64_t>(gridDim.x) * kSelectThreads) {
    const RowMeta& meta = *table.Meta(static_cast<uint32_t>(row));
    if (!may_leave(static_cast<uint32_t>(row), meta)) continue;
    const Score score = may_leave.Of(meta);
    if (score.Agrees(search->found, byte)) atomicAdd(&own[score.Byte(byte)], 1u);
  }
  __syncthreads();
  if (own[threadIdx.x] != 0) atomicAdd(&bins[threadIdx.x], own[threadIdx.x]);
}

// The next byte belongs to the bin in which the count is reached. Clears the bins.
static __global__ void __launch_bounds__(256) ChooseByteKernel(int byte, unsigned* bins, Search* search) {
  FUSEDREC_SHARED(unsigned, warp_sums, 8);
  const unsigned mine = bins[threadIdx.x];
  const unsigned long long count = search->count;
  unsigned until = WarpInclusiveSum(mine);
  if (Lane() == 31) warp_sums[Warp()] = until;
  __syncthreads();  // also: all have read the count
  for (int w = 0; w < Warp(); ++w) until += warp_sums[w];
  if (until - mine < count && count <= until) {  // one thread
    const unsigned long long bits = static_cast<unsigned long long>(threadIdx.x) << (56 - byte % 8 * 8);
    (byte < 8 ? search->found.high : search->found.low) |= bits;
    search->count = count - (until - mine);
  }
  bins[threadIdx.x] = 0;
}

// found [num_ids]: rows of ids of one segment, whose lines these are; kNowhere without one.
static __global__ void __launch_bounds__(kSelectThreads)
    FindRowsKernel(const SegmentLines* lines, const int64_t* __restrict__ ids, int64_t num_ids,
                   uint32_t* __restrict__ found) {
  const int64_t n = GlobalThread();
  const bool active = n < num_ids;
  const int64_t id = active ? ids[n] : 0;
  const uint32_t row = FindRow(active ? lines : nullptr, id, TableHash(id));
  if (active) found[n] = row;
}

}  // namespace device_table
}  // namespace fusedrec
