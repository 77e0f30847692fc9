// Lists the rows that a checkpoint copies: all rows, or the rows that changed since the last full save, and the ids that
// left. ChangeLog tells which ids may have changed; the headers of their rows decide.
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {

uint32_t HashTable::BeginUpdate(uint32_t clock) {
  change_log_.Update(clock);
  return version_.fetch_add(1) + 1;
}

void HashTable::Keys(int64_t segment, uint32_t since, const ParallelFor& parallel_for, std::vector<int64_t>* ids,
                     std::vector<int64_t>* handles) const {
  struct Found {
    std::vector<int64_t> ids, handles;
  };
  std::vector<Found> found(kShards);
  const bool recorded = change_log_.Covers(since);
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
      if (since == 0) {  // all ids: no header has to be read
        here.ids.reserve(shard.keys[segment].size());
        here.handles.reserve(shard.keys[segment].size());
        shard.keys[segment].ForEach(take);
      } else if (recorded) {
        std::vector<int64_t>& touched = shard.changes.touched[segment];
        KeepDistinct(&touched);
        for (const int64_t id : touched) {
          const uint32_t handle = shard.keys[segment].Find(id, TableHash(id));
          if (handle != kAbsent && rows_.Header(handle)->updated > since) take(id, handle);
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
    for (const int64_t id : shards_[s].changes.left[segment]) {
      if (shards_[s].keys[segment].Find(id, TableHash(id)) == kAbsent) gone.push_back(id);
    }
  }
  KeepDistinct(&gone);
  return gone;
}

void HashTable::ForgetTombstones() {
  change_log_.Stop();
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    shards_[s].changes.Clear();
  }
  change_log_.Begin(version(), clock(), spec_.record_tombstones);
}

}  // namespace fusedrec
