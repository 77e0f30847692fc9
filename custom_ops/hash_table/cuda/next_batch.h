// The batch that comes next on a device whose rows are in host memory (host_rows.cc): its ids, by segment, and the rows that
// the device must get for it. Hot rows lie there already.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/hot_rows.h"
#include "rank_partition/rank_partition.h"

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
  void GroupBySegment(int64_t segments) {
    const int64_t num_ids = handles.size();
    std::vector<int32_t> position(num_ids), id_splits(splits.size());
    ids.resize(num_ids);
    order.resize(num_ids);
    segment_splits.resize(segments + 1);
    UnpackMessage(entries, splits, absl::MakeSpan(ids), absl::MakeSpan(segment_splits), absl::MakeSpan(position),
                  absl::MakeSpan(id_splits));
    for (int64_t v = 0; v < num_ids; ++v) order[position[v]] = v;
  }
  // Chooses the rows that the look-ahead found: of the pool, for `parcel`, or for `more` if they are among `waiting`, whose
  // state in host memory is old.
  void ChooseAhead(const HashTable& table, const HotRows& pool, const std::vector<SegmentId>& waiting, Parcel* parcel,
                   Parcel* more) {
    absl::flat_hash_set<int64_t> met(handles.size());
    const absl::flat_hash_set<SegmentId> comes_back(waiting.begin(), waiting.end(), waiting.size());
    // The device has the rows of `parcel`, then those of `more`, then the hot ones.
    Told of_more, of_pool;
    const auto choose = [&](const SegmentId& key, int64_t received) {
      const int64_t handle = handles[received];
      if (handle == kNoRow || !met.insert(handle).second) return;
      const int64_t slot = pool.Find(key, table.HeaderOf(handle));
      if (slot != kNoRow) {
        hot.ids.push_back(key.id);
        hot.slots.push_back(slot);
        of_pool.Add(key, received);
      } else if (comes_back.contains(key)) {
        more->Add(key.id, handle);
        of_more.Add(key, received);
      } else {
        parcel->Add(key.id, handle);
        told.Add(key, received);
      }
    };
    ForEachId(choose, [&] {
      parcel->EndSegment();
      more->EndSegment();
      hot.splits.push_back(hot.ids.size());
    });
    told.Append(of_more);
    told.Append(of_pool);
  }
  // Chooses the rows that have changed since. numbers [V], found: inverse and handles of the lookup.
  void ChooseLate(const HashTable& table, const ParallelFor& parallel_for, const std::vector<int32_t>& numbers,
                  const std::vector<int64_t>& found, Parcel* parcel) {
    // Headers lie anywhere in memory, so several threads read them.
    constexpr int64_t kCyclesOfHeader = 100;
    std::vector<char> is_late(found.size());  // and not chosen yet
    parallel_for(found.size(), kCyclesOfHeader, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) is_late[n] = table.HeaderOf(found[n]).updated > version;
    });
    const auto choose = [&](const SegmentId& key, int64_t received) {
      const int32_t number = numbers[received];
      if (!is_late[number]) return;
      is_late[number] = false;
      parcel->Add(key.id, found[number]);
      if (handles[received] == kNoRow) told.Add(key, received);
    };
    ForEachId(choose, [&] { parcel->EndSegment(); });
  }

 private:
  // Calls visit(key, received) for all ids, and end_segment() behind the ids of each segment.
  template <typename Visit, typename EndSegment>
  void ForEachId(const Visit& visit, const EndSegment& end_segment) const {
    for (size_t s = 0; s + 1 < segment_splits.size(); ++s) {
      for (int64_t i = segment_splits[s]; i < segment_splits[s + 1]; ++i) {
        visit(SegmentId{static_cast<int64_t>(s), ids[i]}, order[i]);
      }
      end_segment();
    }
  }
};

}  // namespace fusedrec
