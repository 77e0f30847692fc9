// What a checkpoint copies: all rows, or those that changed since the last full save, and the ids that have left.
//
// # Which rows have changed
// A row's header has the version that changed it last, but to read the headers of all rows takes longer than to copy the
// few that changed. So a table that records tombstones also records, from one full save to the next, the ids that
// training lookups and imports touch, each about once: the header's `last` tells whether it was touched before. What was
// touched is more than what was changed; the headers of these ids decide. Where the record cannot be trusted to be
// complete, because it grew too long to be of use, or because gradients came of a lookup from before it began, it is
// dropped, and all headers are read.
#include <algorithm>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

// An id of a shard whose mutex is held is about to be touched; `last` is the clock at which it was touched before.
void HashTable::RecordTouch(Shard* shard, int64_t segment, int64_t id, uint32_t last) {
  if (last > record_clock_.load(std::memory_order_relaxed)) return;
  constexpr size_t kAlwaysKept = 256;
  std::vector<int64_t>& touched = shard->touched[segment];
  if (touched.size() >= kAlwaysKept + shard->keys[segment].size() / 4) {
    record_clock_.store(-1);
    return;
  }
  touched.push_back(id);
}

// Rows that a lookup of this clock touched are about to change; 0: none has a row.
uint32_t HashTable::BeginUpdate(uint32_t clock) {
  if (clock > 0 && clock <= record_clock_.load(std::memory_order_relaxed)) record_clock_.store(-1);
  return version_.fetch_add(1) + 1;
}

void HashTable::Keys(int64_t segment, uint32_t since, const ParallelFor& parallel_for, std::vector<int64_t>* ids,
                     std::vector<int64_t>* handles) const {
  struct Found {
    std::vector<int64_t> ids, handles;
  };
  std::vector<Found> found(kShards);
  const bool recorded = record_clock_.load() >= 0 && since >= record_version_.load() && since > 0;
  const int64_t keys = size(segment) / kShards + 1;
  parallel_for(kShards, 20 * keys, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Shard& shard = shards_[s];
      Found& here = found[s];
      const auto take = [&](int64_t id, uint32_t handle) {
        here.ids.push_back(id);
        here.handles.push_back(handle);
      };
      std::lock_guard<std::mutex> lock(shard.mutex);
      if (since == 0) {  // all: nobody has to look into rows
        here.ids.reserve(shard.keys[segment].size());
        here.handles.reserve(shard.keys[segment].size());
        shard.keys[segment].ForEach(take);
      } else if (recorded) {
        std::vector<int64_t>& touched = shard.touched[segment];
        std::sort(touched.begin(), touched.end());
        touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
        for (const int64_t id : touched) {
          const uint32_t handle = shard.keys[segment].Find(id, TableHash(id));
          if (handle != kAbsent && RowFormat::Header(RowOf(handle))->updated > since) take(id, handle);
        }
      } else {
        ForEachRow(shard, segment, [&](int64_t id, uint32_t handle, const RowHeader& header) {
          if (header.updated > since) take(id, handle);
        });
      }
    }
  });
  for (const Found& here : found) {
    ids->insert(ids->end(), here.ids.begin(), here.ids.end());
    handles->insert(handles->end(), here.handles.begin(), here.handles.end());
  }
}

std::vector<int64_t> HashTable::Tombstones(int64_t segment) const {
  std::vector<int64_t> gone;
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    for (const int64_t id : shards_[s].tombstones[segment]) {
      if (shards_[s].keys[segment].Find(id, TableHash(id)) == kAbsent) gone.push_back(id);
    }
  }
  std::sort(gone.begin(), gone.end());
  gone.erase(std::unique(gone.begin(), gone.end()), gone.end());
  return gone;
}

void HashTable::ForgetTombstones() {
  record_clock_.store(-1);
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    for (std::vector<int64_t>& of_segment : shards_[s].tombstones) of_segment.clear();
    for (std::vector<int64_t>& of_segment : shards_[s].touched) of_segment.clear();
  }
  record_version_.store(version());
  if (spec_.record_tombstones) record_clock_.store(clock());
}

}  // namespace fusedrec
