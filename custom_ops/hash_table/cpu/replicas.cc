// Replicas of a table that train apart and are averaged from time to time (2D sparse parallelism, Algorithm 1).
//
// An id without a row at a replica counts with its initial row in the mean, whether it never came or was evicted. An id
// that left one replica leaves all of them, unless another replica has trained it meanwhile.
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/reader.h"

namespace fusedrec {

void HashTable::NoteTrained(const Message& message) { trained_.Add(message); }

void HashTable::TakeUnsynced(std::vector<int64_t>* counts, std::vector<int64_t>* ids, std::vector<int64_t>* headers) {
  const IdsBySegment trained = trained_.Take();
  for (int64_t segment = 0; segment < segments(); ++segment) {
    const size_t before = ids->size();
    for (const int64_t id : trained[segment]) {
      const uint64_t hash = TableHash(id);
      const Shard& shard = shards_[ShardOf(hash)];
      std::lock_guard<std::mutex> lock(shard.mutex);
      const uint32_t handle = shard.keys[segment].Find(id, hash);
      if (handle == kAbsent) continue;  // refused by admission, or gone since
      const RowHeader& header = *rows_.Header(handle);
      ids->push_back(id);
      headers->push_back(int64_t{header.last} << 32 | header.count);
    }
    counts->push_back(ids->size() - before);
  }
  for (int64_t segment = 0; segment < segments(); ++segment) {
    std::vector<int64_t> gone;
    for (int s = 0; s < kShards; ++s) {
      Shard& shard = shards_[s];
      std::lock_guard<std::mutex> lock(shard.mutex);
      for (const int64_t id : shard.unsynced[segment]) {
        if (shard.keys[segment].Find(id, TableHash(id)) == kAbsent) gone.push_back(id);
      }
      shard.unsynced[segment].clear();
    }
    KeepDistinct(&gone);
    ids->insert(ids->end(), gone.begin(), gone.end());
    counts->push_back(gone.size());
  }
  headers->resize(ids->size(), 0);
}

void HashTable::ReadNumbers(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                            const ParallelFor& parallel_for, float* numbers) const {
  const int64_t width = format(0).numbers();
  for (int64_t segment = 0; segment < segments(); ++segment) {
    const int64_t first = segment_splits[segment];
    parallel_for(segment_splits[segment + 1] - first, 200 + width, [&](int64_t begin, int64_t end) {
      Reader reader(this);
      std::vector<char> initial(format(new_pool()).stride());
      for (int64_t i = first + begin; i < first + end; ++i) {
        const uint64_t hash = TableHash(ids[i]);
        const uint32_t handle = shards_[ShardOf(hash)].keys[segment].Find(ids[i], hash);
        if (handle != kAbsent) {
          format(RowStore::PoolOf(handle)).Load(rows_.Row(handle), numbers + i * width);
        } else {  // through the storage, with the rounding of a lookup
          WriteInitial(segment, ids[i], new_pool(), initial.data());
          format(new_pool()).Load(initial.data(), numbers + i * width);
        }
      }
    });
  }
}

absl::Status HashTable::WriteNumbers(Shard* shard, int64_t segment, int64_t id, const float* numbers, int64_t header,
                                     uint32_t step) {
  const uint64_t hash = TableHash(id);
  uint32_t handle = shard->keys[segment].Find(id, hash);
  if (handle == kAbsent) {
    absl::Status made = shard->keys[segment].Reserve(1, &shard->retired);
    const int pool = memory_rows_ > 0 && rows_in_pool(0) >= memory_rows_ ? 1 : 0;
    if (made.ok()) made = MakeRow(shard, segment, id, pool, &handle);
    if (!made.ok()) return made;
  }
  char* row = rows_.Row(handle);
  change_log_.Touch(&shard->changes, segment, id, 0, shard->keys[segment].size());
  RowHeader* about = RowFormat::Header(row);
  about->last = static_cast<uint32_t>(header >> 32);
  about->count = static_cast<uint32_t>(header);
  about->updated = version_.load(std::memory_order_relaxed);
  format(RowStore::PoolOf(handle)).Store(numbers, step, row);
  return absl::OkStatus();
}

absl::Status HashTable::Merge(absl::Span<const int64_t> left, absl::Span<const int64_t> left_splits,
                              absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                              const float* numbers, absl::Span<const int64_t> headers, uint32_t step) {
  std::lock_guard<std::mutex> lock(room_mutex_);
  version_.fetch_add(1);
  const Pins pins = CurrentPins();
  const int64_t width = format(0).numbers();
  for (int64_t segment = 0; segment < segments(); ++segment) {
    for (int64_t i = left_splits[segment]; i < left_splits[segment + 1]; ++i) {
      Shard* shard = &shards_[ShardOf(TableHash(left[i]))];
      std::lock_guard<std::mutex> shard_lock(shard->mutex);
      const uint32_t handle = shard->keys[segment].Find(left[i], TableHash(left[i]));
      if (handle == kAbsent || pins.Hold(*rows_.Header(handle))) continue;
      NoteMove(pins.now);
      RemoveKey(shard, segment, left[i]);
      shard->unsynced[segment].pop_back();  // no replica has to be told
    }
    for (int64_t i = segment_splits[segment]; i < segment_splits[segment + 1]; ++i) {
      Shard* shard = &shards_[ShardOf(TableHash(ids[i]))];
      std::lock_guard<std::mutex> shard_lock(shard->mutex);
      const absl::Status written = WriteNumbers(shard, segment, ids[i], numbers + i * width, headers[i], step);
      if (!written.ok()) return written;
    }
    // Each replica has kept its limit, but not with the same rows.
    const int64_t excess = spec_.max_rows > 0 ? size(segment) - spec_.max_rows : 0;
    if (excess > 0 && EvictWorst(segment, excess, {}) < excess) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "max_rows is ", spec_.max_rows, ", but the replicas of ",
          spec_.names.empty() ? absl::StrCat("segment ", segment) : absl::StrCat("table '", spec_.names[segment], "'"),
          " have ", excess, " rows more together that may not leave. Remedy: a larger max_rows, an eviction policy, ",
          "or a smaller sync_every."));
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
