#include "segment_unique/segment_unique_cuda.h"

#include "common/device.cuh"
#include "common/hash.h"
#include "common/look_back.cuh"
#include "common/launcher.cuh"

namespace fusedrec::segment_unique {

constexpr int kInsertIds = 4;   // of a thread: their reads are under way together
constexpr int kNumberIds = 8;
constexpr int kInsertTile = kThreads * kInsertIds, kNumberTile = kThreads * kNumberIds;
constexpr uint32_t kFree = 0xffffffffu;  // larger than every position, so atomicMin serves the first one, too

// The segment of position n, among [low, high].
__device__ inline int64_t SegmentOf(const int64_t* splits, int64_t low, int64_t high, int64_t n) {
  return LastBegun([&](int64_t segment) { return splits[segment]; }, low, high, n);
}

// The slot in which the id of position n settles, looking from `slot` on, in which `seen` was read.
__device__ inline uint32_t Settle(const int64_t* ids, int64_t id, uint32_t n, uint32_t begin, uint32_t size,
                                  uint32_t slot, uint32_t seen, uint32_t* slots) {
  for (;;) {
    if (seen == kFree) {
      seen = atomicCAS(&slots[slot], kFree, n);
      if (seen == kFree) return slot;
    }
    if (ids[seen] == id) {
      if (n < seen) atomicMin(&slots[slot], n);
      return slot;
    }
    if (++slot == begin + size) slot = begin;
    seen = LoadFresh(&slots[slot]);
  }
}

// slot_of[n]: where the id of position n settled.
FUSEDREC_KERNEL SegmentUniqueInsertKernel(const int64_t* __restrict__ ids, const int64_t* __restrict__ splits,
    int64_t num_ids, int64_t num_segments, uint32_t* slots, uint32_t* __restrict__ slot_of) {
  FUSEDREC_SHARED(int64_t, bounds, 2);  // segments of the first and of the last position of the tile
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kInsertTile;
  if (threadIdx.x < 2) {
    const int64_t last = tile + kInsertTile < num_ids ? tile + kInsertTile - 1 : num_ids - 1;
    bounds[threadIdx.x] = SegmentOf(splits, 0, num_segments - 1, threadIdx.x == 0 ? tile : last);
  }
  __syncthreads();
  const int64_t low = bounds[0], high = bounds[1];

  int64_t id[kInsertIds];
  uint32_t begin[kInsertIds], size[kInsertIds], slot[kInsertIds], seen[kInsertIds];
#pragma unroll
  for (int k = 0; k < kInsertIds; ++k) {
    const int64_t n = tile + k * kThreads + threadIdx.x;
    size[k] = 0;
    if (n >= num_ids) continue;
    id[k] = ids[n];
    const int64_t segment = SegmentOf(splits, low, high, n);
    begin[k] = static_cast<uint32_t>(2 * splits[segment]);
    size[k] = static_cast<uint32_t>(2 * (splits[segment + 1] - splits[segment]));
    slot[k] = begin[k] + static_cast<uint32_t>(__umul64hi(SlotHash(id[k]), size[k]));
  }
  // The cache of this multiprocessor may answer. The swap fails on a slot that was free there and is taken by now. An
  // occupied slot never changes.
#pragma unroll
  for (int k = 0; k < kInsertIds; ++k) seen[k] = size[k] > 0 ? slots[slot[k]] : kFree;
#pragma unroll
  for (int k = 0; k < kInsertIds; ++k) {
    const int64_t n = tile + k * kThreads + threadIdx.x;
    if (size[k] == 0) continue;
    slot_of[n] = Settle(ids, id[k], static_cast<uint32_t>(n), begin[k], size[k], slot[k], seen[k], slots);
  }
}

// first[n], on entry the slot of n: becomes the first position of the same id. number[n], n up to and with num_ids:
// first occurrences before n.
FUSEDREC_KERNEL SegmentUniqueNumberKernel(const int64_t* __restrict__ ids, int64_t num_ids,
    const uint32_t* __restrict__ slots, uint32_t* __restrict__ first, uint32_t* __restrict__ number,
    int64_t* __restrict__ unique_ids, unsigned long long* states, unsigned* next_tile) {
  FUSEDREC_SHARED(unsigned, warp_begin, kWarps);
  const unsigned tile = TakeTile(next_tile);
  // A warp has positions side by side, 32 at a time, so that ballots count in order.
  const int64_t base = static_cast<int64_t>(tile) * kNumberTile + Warp() * 32 * kNumberIds + Lane();
  uint32_t own[kNumberIds];
  unsigned firsts[kNumberIds];
  unsigned warp_sum = 0;
#pragma unroll
  for (int k = 0; k < kNumberIds; ++k) {
    const int64_t n = base + k * 32;
    own[k] = n < num_ids ? first[n] : 0;
  }
#pragma unroll
  for (int k = 0; k < kNumberIds; ++k) {
    const int64_t n = base + k * 32;
    own[k] = n < num_ids ? slots[own[k]] : kFree;
    firsts[k] = __ballot_sync(kFullWarp, own[k] == n);
    warp_sum += __popc(firsts[k]);
  }
  if (Lane() == 0) warp_begin[Warp()] = warp_sum;
  __syncthreads();
  if (Warp() == 0) {
    const unsigned sum = Lane() < kWarps ? warp_begin[Lane()] : 0;
    const unsigned until = WarpInclusiveSum(sum);
    const unsigned before = LookBack(states, tile, __shfl_sync(kFullWarp, until, 31));
    if (Lane() < kWarps) warp_begin[Lane()] = before + until - sum;
  }
  __syncthreads();
  unsigned next = warp_begin[Warp()];
#pragma unroll
  for (int k = 0; k < kNumberIds; ++k) {
    const int64_t n = base + k * 32;
    const unsigned mine = next + __popc(firsts[k] & LanesBefore());
    next += __popc(firsts[k]);
    if (n <= num_ids) number[n] = mine;
    if (n >= num_ids) continue;
    first[n] = own[k];
    if (own[k] == n) unique_ids[mine] = ids[n];
  }
}

FUSEDREC_KERNEL SegmentUniqueInverseKernel(int64_t num_ids, const uint32_t* __restrict__ first,
    const uint32_t* __restrict__ number, const int64_t* __restrict__ splits, int64_t num_segments,
    int64_t* __restrict__ unique_splits, int32_t* __restrict__ inverse) {
  const int64_t n = GlobalThread();
  if (n < num_ids) inverse[n] = static_cast<int32_t>(number[first[n]]);
  if (n <= num_segments) unique_splits[n] = number[splits[n]];
}

}  // namespace fusedrec::segment_unique

#ifndef __CUDACC_RTC__
int fusedrec_segment_unique(const int64_t* ids, const int64_t* segment_splits, int64_t num_ids, int64_t num_segments,
    const FusedrecAllocator* memory, int64_t* unique_ids, int64_t* unique_splits, int32_t* inverse, void* stream) {
  using namespace fusedrec;                  // NOLINT
  using namespace fusedrec::segment_unique;  // NOLINT
  if (num_ids == 0) {
    std::fill_n(unique_splits, num_segments + 1, 0);
    return kCudaSuccess;
  }
  // One position more than there are ids: the number after the last one is their sum.
  const int64_t tiles = (num_ids + kNumberTile) / kNumberTile;
  uint32_t *slots, *first, *number;
  unsigned long long* states;
  unsigned* next_tile;
  int64_t *splits, *bounds;
  ScratchMemory scratch(memory);
  FUSEDREC_TRY(scratch.Take({{&slots, 2 * num_ids}, {&states, tiles}, {&next_tile, 1}, {&splits, num_segments + 1},
                             {&bounds, num_segments + 1}, {&first, num_ids}, {&number, num_ids + 1}}));
  FUSEDREC_TRY(CopyToDevice(splits, segment_splits, num_segments + 1, stream));
  FUSEDREC_TRY(Fill(slots, 0xff, BytesBetween(slots, splits), stream));  // states and next_tile, too
  FUSEDREC_LAUNCH(SegmentUniqueInsertKernel, BlocksFor(num_ids, kInsertTile), kThreads, 0, stream, ids, splits, num_ids,
                  num_segments, slots, first);
  FUSEDREC_LAUNCH(SegmentUniqueNumberKernel, static_cast<unsigned>(tiles), kThreads, 0, stream, ids, num_ids, slots,
                  first, number, unique_ids, states, next_tile);
  const int64_t threads = num_ids > num_segments ? num_ids : num_segments + 1;
  FUSEDREC_FOR_EACH(SegmentUniqueInverseKernel, threads, stream, num_ids, first, number, splits, num_segments, bounds,
                    inverse);
  FUSEDREC_TRY(LastError());
  return CopyToHost(unique_splits, bounds, num_segments + 1, stream);
}
#endif
