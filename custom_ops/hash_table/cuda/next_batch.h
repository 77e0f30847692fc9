// The batch that comes next on a device whose rows are in host memory (host_rows.h): its ids, by segment, and the rows that
// the device must get for it. Hot rows lie there already.
#pragma once

#include <cstdint>
#include <vector>

#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/hot_rows.h"

namespace fusedrec {

// Rows for the device, by segment.
struct Parcel {
  std::vector<int64_t> ids, handles, splits{0};
  char* records = nullptr;  // in page-locked memory

  void Add(int64_t id, int64_t handle) {
    ids.push_back(id);
    handles.push_back(handle);
  }
  void EndSegment() { splits.push_back(ids.size()); }
};

struct NextBatch {
  // Rows that the device has, in their order there, and a received id of each.
  struct Told {
    std::vector<SegmentId> keys;
    std::vector<int64_t> received;

    void Add(const SegmentId& key, int64_t its_received) {
      keys.push_back(key);
      received.push_back(its_received);
    }
    void Append(const Told& others) {
      keys.insert(keys.end(), others.keys.begin(), others.keys.end());
      received.insert(received.end(), others.received.begin(), others.received.end());
    }
  };
  // Its rows in the pool, by segment.
  struct Hot {
    std::vector<int64_t> ids, slots, splits{0};

    FusedrecHotRows view() const { return {ids.data(), splits.data(), slots.data()}; }
  };

  NextBatch() = default;
  // With room for the ids of a message.
  explicit NextBatch(const Message& message)
      : entries(message.entries.size()),
        splits(message.source_splits.begin(), message.source_splits.end()),
        handles(message.num_ids, kNoRow) {}

  int64_t look_ahead = 0;  // number of the look-ahead that has sent the rows; 0: none has
  std::vector<int64_t> entries;
  std::vector<int32_t> splits;
  std::vector<int64_t> handles;    // [V]  rows as the look-ahead found them, kNoRow for none
  int64_t version = 0, moves = 0;  // of the table then
  uint64_t fingerprint = 0;        // of the message
  std::vector<int64_t> ids, segment_splits, order;  // by segment: ids, and which received one each is
  Told told;
  Hot hot;

  Message message() const { return {entries, splits, static_cast<int64_t>(handles.size())}; }
  Ahead ahead() const { return {handles, version, moves, fingerprint}; }
  // Sets ids, segment_splits and order, from entries and splits.
  void GroupBySegment(int64_t segments);
  // Chooses the rows that the look-ahead found: of the pool, for `parcel`, or for `more` if they are among `waiting`, whose
  // state in host memory is old.
  void ChooseAhead(const HashTable& table, const HotRows& pool, const std::vector<SegmentId>& waiting,
                   Parcel* parcel, Parcel* more);
  // Chooses the rows that have changed since. numbers [V], found: inverse and handles of the lookup.
  void ChooseLate(const HashTable& table, const ParallelFor& parallel_for, const std::vector<int32_t>& numbers,
                  const std::vector<int64_t>& found, Parcel* parcel);

 private:
  // Calls visit(key, received) for all ids, and end_segment() behind the ids of each segment.
  template <typename Visit, typename EndSegment>
  void ForEachId(const Visit& visit, const EndSegment& end_segment) const;
};

}  // namespace fusedrec
