// Passes over all rows (select.cuh), for the methods of FusedrecDeviceTable that choose rows.
#pragma once

#include <algorithm>

#include "hash_table/cuda/select.cuh"
#include "hash_table/cuda/table_memory.h"

// Counts the wanted rows, by segment the rows that do_with counts, and the places of each pool.
template <typename Wanted, typename MakeDoWith>
int FusedrecDeviceTable::Select(const Wanted& wanted, const MakeDoWith& make_do_with,
                                const SelectScratch& at, std::vector<int64_t>* counts,
                                void* stream) const {
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
int FusedrecDeviceTable::Count(const Wanted& wanted, const SelectScratch& at, int64_t* count,
                               void* stream) const {
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
