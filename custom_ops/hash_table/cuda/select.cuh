// Passes over the metas of all rows, in the order of rows. They choose the rows that leave and the rows of an export.
//
// The k rows of a segment that its policy ranks lowest are found exactly, as on the CPU (eviction.h). The k-th smallest
// (score, hash of the id) is built a byte at a time. Each step counts the rows that agree with the bytes found so far.
// Then one pass takes out all rows up to it. Ranks come from ballots and a look-back. So rows become free, and are
// exported, in the order of rows, whatever the threads do.
#pragma once

#include "common/look_back.cuh"
#include "hash_table/cuda/rows.cuh"

namespace fusedrec::device_table {

constexpr unsigned long long kMarked = ~0ull;  // touch of a row that is to leave
constexpr int kScoreBytes = 16;                // of (score, hash)

struct Score {
  unsigned long long high, low;  // by policy; hash of the id: the same choice in any order

  __device__ static Score Of(const RowMeta& meta, const Limits& limits, uint32_t clock) {
    return {limits.ScoreOf(meta.count, meta.last, clock), TableHash(meta.id)};
  }
  __device__ int Byte(int i) const { return static_cast<int>((i < 8 ? high : low) >> (56 - i % 8 * 8) & 0xff); }
  // Returns whether the first `bytes` of both are equal.
  __device__ bool Agrees(const Score& other, int bytes) const {
    for (int i = 0; i < bytes; ++i) {
      if (Byte(i) != other.Byte(i)) return false;
    }
    return true;
  }
  __device__ bool IsAbove(const Score& other) const { return high != other.high ? high > other.high : low > other.low; }
};

struct Search {
  Score found;               // its bytes so far
  unsigned long long count;  // of the rows that agree with them, this many are not above
};

struct MayLeave {
  uint32_t segment;
  Limits limits;  // of the segment
  Pins pins;
  const Score* most;  // null: whatever the score

  __device__ Score Of(const RowMeta& meta) const { return Score::Of(meta, limits, pins.clock); }
  __device__ bool operator()(uint32_t, const RowMeta& meta) const {
    return meta.segment == segment && !pins.Hold(meta) && (most == nullptr || !Of(meta).IsAbove(*most));
  }
};
struct IsMarked {
  __device__ bool operator()(uint32_t, const RowMeta& meta) const {
    return meta.segment != kNobody && meta.touch == kMarked;
  }
};
struct HasChanged {
  uint32_t segment;
  Moment since;  // its beginning: all rows

  __device__ bool operator()(uint32_t, const RowMeta& meta) const {
    return meta.segment == segment && (since.IsBeginning() || since.IsBefore(meta.last, meta.updated));
  }
};

struct Nothing {
  __device__ void operator()(uint32_t, RowMeta*, int64_t) const {}
};
struct TakeOut {
  TableView table;
  int64_t free;                 // height of the stack before
  unsigned long long* gone_of;  // [segments]
  GivenBack places;             // of a mixed table
  LeftRow* left;                // in the order of rows; null: nobody asks

  __device__ void operator()(uint32_t row, RowMeta* meta, int64_t rank) const {
    const SegmentLines& lines = table.segments[meta->segment];
    RemoveKey(lines.lines, lines.mask, meta->id, TableHash(meta->id));
    atomicAdd(&gone_of[meta->segment], 1ull);
    *table.Free(static_cast<uint32_t>(free + rank)) = row;
    if (table.mixed) places.Add(table, *table.Place(row));
    if (left != nullptr) left[rank] = {meta->id, meta->segment, table.layout.noted ? *table.Note(row) : uint32_t{0}};
    meta->segment = kNobody;
    meta->touch = 0;
  }
};
struct Export {
  int64_t *ids, *handles;
  int64_t most;  // places in each

  __device__ void operator()(uint32_t row, RowMeta* meta, int64_t rank) const {
    if (rank >= most) return;
    ids[rank] = meta->id;
    handles[rank] = row;
  }
};

// do_with(row, meta, rank) for the rows among [0, num_rows) that are wanted; *selected: how many.
template <typename Wanted, typename DoWith>
FUSEDREC_KERNEL SelectKernel(TableView table, int64_t num_rows, Wanted wanted, DoWith do_with,
                             unsigned long long* selected, unsigned long long* states, unsigned* next_tile) {
  FUSEDREC_SHARED(unsigned, begin, kWarps);
  const unsigned tile = TakeTile(next_tile);
  const int64_t row = static_cast<int64_t>(tile) * kThreads + threadIdx.x;
  RowMeta* const meta = row < num_rows ? table.Meta(static_cast<uint32_t>(row)) : nullptr;
  const bool mine = meta != nullptr && wanted(static_cast<uint32_t>(row), *meta);
  const unsigned votes = __ballot_sync(kFullWarp, mine);
  if (Lane() == 0) begin[Warp()] = __popc(votes);
  __syncthreads();
  if (Warp() == 0) {
    const unsigned sum = Lane() < kWarps ? begin[Lane()] : 0, until = WarpInclusiveSum(sum);
    const unsigned all = __shfl_sync(kFullWarp, until, 31), before = LookBack(states, tile, all);
    if (Lane() < kWarps) begin[Lane()] = before + until - sum;
    if (tile == gridDim.x - 1 && Lane() == 0) *selected = before + all;
  }
  __syncthreads();
  if (mine) do_with(static_cast<uint32_t>(row), meta, begin[Warp()] + __popc(votes & LanesBefore()));
}

// Marks the rows of ids of one segment, with `spares` the rows alone that no pin holds.
FUSEDREC_KERNEL MarkKernel(TableView table, uint32_t segment, const int64_t* __restrict__ ids, int64_t num_ids,
                           Pins pins, bool spares) {
  const int64_t n = GlobalThread();
  const bool active = n < num_ids;
  const int64_t id = active ? ids[n] : 0;
  const uint32_t row = FindRow(active ? table.segments + segment : nullptr, id, TableHash(id));
  if (row != kNowhere && !(spares && pins.Hold(*table.Meta(row)))) StoreFresh(&table.Meta(row)->touch, kMarked);
}

}  // namespace fusedrec::device_table

#ifndef __CUDACC_RTC__
#include "hash_table/cuda/table_memory.h"

// Counts the wanted rows, by segment the rows that do_with counts, and the places of each pool.
template <typename Wanted, typename MakeDoWith>
int FusedrecDeviceTable::Select(const Wanted& wanted, const MakeDoWith& make_do_with, const SelectScratch& at,
    std::vector<int64_t>* counts, void* stream) const {
  const int64_t segments = segments_.size();
  FUSEDREC_TRY(Fill(at.states, 0xff, BytesBetween(at.states, at.selected), stream));
  FUSEDREC_TRY(Fill(at.selected, 0, (1 + segments + 2) * sizeof(int64_t), stream));
  const auto do_with = make_do_with(at.selected + 1);
  using DoWith = std::decay_t<decltype(do_with)>;
  const auto kernel = &SelectKernel<Wanted, DoWith>;
  FUSEDREC_LAUNCH(kernel, static_cast<unsigned>(at.tiles), kThreads, 0, stream, View(), rows_.next, wanted,
                  do_with, at.selected, at.states, at.next_tile);
  FUSEDREC_TRY(LastError());
  counts->resize(1 + segments + 2);
  return CopyToHost(counts->data(), reinterpret_cast<int64_t*>(at.selected), counts->size(), stream);
}

template <typename Wanted>
int FusedrecDeviceTable::Count(const Wanted& wanted, const SelectScratch& at, int64_t* count, void* stream) const {
  std::vector<int64_t> counts;
  const auto nothing = [](unsigned long long*) { return Nothing{}; };
  FUSEDREC_TRY(Select(wanted, nothing, at, &counts, stream));
  *count = counts[0];
  return kCudaSuccess;
}

template <typename Wanted>
int FusedrecDeviceTable::TakeRowsOut(const Wanted& wanted, int64_t stale_until, bool evicted, const RemovedRows& removed,
                                     int64_t* gone, void* stream) {
  LeftRow* const left = removed.left;
  const auto take_out = [&](unsigned long long* gone_of) {
    const GivenBack places{hot_.free, cold_.free, gone_of + segments()};
    return TakeOut{View(), rows_.free, gone_of, places, left};
  };
  std::vector<int64_t> counts;
  FUSEDREC_TRY(Select(wanted, take_out, removed, &counts, stream));
  *gone = counts[0];
  if (*gone > 0) stale_until_ = std::max(stale_until_, stale_until);
  rows_.free += *gone;
  hot_.free += counts[1 + segments()];
  cold_.free += counts[2 + segments()];
  for (int64_t s = 0; s < segments(); ++s) {
    segments_[s].size -= counts[1 + s];
    segments_[s].removed += counts[1 + s];
    if (evicted) segments_[s].evictions += counts[1 + s];
  }
  if (left == nullptr || *gone == 0) return kCudaSuccess;
  std::vector<LeftRow> rows(*gone);
  FUSEDREC_TRY(CopyToHost(rows.data(), left, *gone, stream));
  for (const LeftRow& row : rows) {
    if (options_.record_tombstones) segments_[row.segment].left.push_back(row.id);
    if (options_.averaged && !removed.replicas_know) segments_[row.segment].unsynced.push_back(row);
  }
  return kCudaSuccess;
}
#endif
