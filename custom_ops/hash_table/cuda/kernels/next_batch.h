// The batch that comes next on a device whose rows are in host memory (host_rows.h): its ids, by segment, and the rows that
// the device must get for it. Hot rows lie there already.
#ifndef FUSEDREC_HASH_TABLE_CUDA_KERNELS_NEXT_BATCH_H_
#define FUSEDREC_HASH_TABLE_CUDA_KERNELS_NEXT_BATCH_H_

#include <cstdint>
#include <vector>

#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/kernels/hot_rows.h"
#include "hash_table/cuda/kernels/row_transfers.h"

namespace fusedrec {

struct NextBatch {
  // Its rows in the pool, by segment.
  struct Hot {
    std::vector<int64_t> ids, slots, splits{0}, received;  // received: a received id of each

    FusedrecHotRows view() const { return {ids.data(), splits.data(), slots.data()}; }
  };

  int64_t look_ahead = 0;  // number of the look-ahead that has sent the rows; 0: none has
  std::vector<int64_t> entries;
  std::vector<int32_t> splits;
  std::vector<int64_t> handles;    // [V]  rows as the look-ahead found them, kNoRow for none
  int64_t version = 0, moves = 0;  // of the table then
  std::vector<int64_t> ids, segment_splits, order;  // by segment: ids, and which received one each is
  std::vector<SegmentId> told;     // rows that the device has, in their order there
  std::vector<int64_t> told_ids;   // and a received id of each
  Hot hot;

  Message message() const { return {entries, splits, static_cast<int64_t>(handles.size())}; }
  Ahead ahead() const { return {handles, version, moves}; }
  // Sets ids, segment_splits and order, from entries and splits.
  void GroupBySegment(int64_t segments);
  // Chooses the rows that the look-ahead found: of the pool, or for the parcel.
  void ChooseAhead(const HashTable& table, const HotRows& pool, RowTransfers::Parcel* parcel);
  // Chooses the rows that have changed since. numbers [V], found: inverse and handles of the lookup.
  void ChooseLate(const HashTable& table, const ParallelFor& parallel_for, const std::vector<int32_t>& numbers,
                  const std::vector<int64_t>& found, RowTransfers::Parcel* parcel);

 private:
  void Tell(const SegmentId& key, int64_t received) {
    told.push_back(key);
    told_ids.push_back(received);
  }
  // Calls visit(key, received) for all ids, and end_segment() behind the ids of each segment.
  template <typename Visit, typename EndSegment>
  void ForEachId(const Visit& visit, const EndSegment& end_segment) const;
};

}  // namespace fusedrec

#endif  // FUSEDREC_HASH_TABLE_CUDA_KERNELS_NEXT_BATCH_H_
