// Eviction: LRU, LFU, TTL.
//
// A scan of the segment finds the exact rows. It chooses 1/16 of max_rows at once, so that scans are rare.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/victims.h"

namespace fusedrec {

absl::Status HashTable::MakeRoom(const std::vector<int64_t>& fresh, const Waiting& waiting) {
  const std::vector<std::string>& names = spec_.names;
  std::lock_guard<std::mutex> lock(room_mutex_);
  int64_t into_memory = waiting.size();
  for (int64_t segment = 0; segment < segments(); ++segment) {
    into_memory += fresh[segment];
    const int64_t excess = size(segment) + fresh[segment] - spec_.max_rows;
    if (spec_.max_rows == 0 || excess <= 0) continue;
    // More than needed, so that not every step has to scan.
    const int64_t gone = EvictWorst(segment, excess + spec_.max_rows / 16, waiting);
    if (gone < excess) {
      const std::string table =
          names.empty() ? absl::StrCat("segment ", segment) : absl::StrCat("table '", names[segment], "'");
      return absl::ResourceExhaustedError(absl::StrCat(
          "max_rows of ", table, " is ", spec_.max_rows, ", but a batch needs ", excess - gone, " rows more while ",
          "the rows of the last ", spec_.window, " lookups, and rows whose gradients wait, may not leave",
          spec_.eviction == Eviction::kNone && spec_.ttl == 0 ? " and eviction is 'none'" : "",
          ". What the table holds stays readable. Remedy: a larger max_rows, an eviction policy, or smaller batches."));
    }
  }
  if (memory_rows_ == 0) return absl::OkStatus();
  const int64_t excess = rows_in_pool(0) + into_memory - memory_rows_;
  if (excess <= 0) return absl::OkStatus();
  auto demoted = DemoteColdest(excess + memory_rows_ / 16);
  if (!demoted.ok()) return demoted.status();
  if (*demoted < excess) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory_budget holds ", memory_rows_, " rows, but a batch needs ", excess - *demoted, " more while the rows ",
        "of the last ", spec_.window, " lookups, and rows whose gradients wait, stay in memory. Remedy: a larger ",
        "memory_budget, or smaller batches."));
  }
  return absl::OkStatus();
}

int64_t HashTable::EvictWorst(int64_t segment, int64_t count, const Waiting& waiting) {
  int64_t gone = 0;
  // Repeats when another lookup has touched some of the victims meanwhile.
  while (gone < count && spec_.eviction != Eviction::kNone) {
    const int64_t more = EvictWorstOnce(segment, count - gone, waiting);
    if (more < 0) break;
    gone += more;
  }
  return gone;
}

int64_t HashTable::EvictWorstOnce(int64_t segment, int64_t count, const Waiting& waiting) {
  const Pins pins = CurrentPins();
  std::vector<Victim> victims;
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    ForEachRow(shards_[s], segment, [&](int64_t id, uint32_t handle, const RowHeader& header) {
      if (pins.Hold(header)) return;
      if (RowStore::PoolOf(handle) == 1 && std::binary_search(waiting.begin(), waiting.end(), std::pair(segment, id))) return;
      const uint64_t frequency = uint64_t{header.count} << 32 | header.last;
      const uint64_t score = spec_.eviction == Eviction::kLru ? header.last : frequency;
      victims.push_back({score, TableHash(id), id, s, static_cast<int32_t>(segment)});
    });
  }
  if (victims.empty()) return -1;
  KeepWorst(&victims, count);
  NoteMove(pins.now);
  int64_t gone = 0;
  for (const Victim& victim : victims) {
    Shard* shard = &shards_[victim.shard];
    std::lock_guard<std::mutex> lock(shard->mutex);
    const uint32_t handle = shard->keys[segment].Find(victim.id, TableHash(victim.id));
    if (handle == kAbsent || pins.Hold(*rows_.Header(handle))) continue;  // another lookup was faster
    RemoveKey(shard, segment, victim.id);
    ++shard->statistics[segment].evictions;
    ++gone;
  }
  return gone;
}

int64_t HashTable::Evict(int64_t segment, int64_t count) {
  std::lock_guard<std::mutex> lock(room_mutex_);
  version_.fetch_add(1);
  return EvictWorst(segment, count, {});
}

void HashTable::EvictExpired() {
  const Pins pins = CurrentPins();
  for (int s = 0; s < kShards; ++s) {
    Shard& shard = shards_[s];
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (int64_t segment = 0; segment < segments(); ++segment) {
      std::vector<int64_t> expired;
      ForEachRow(shard, segment, [&](int64_t id, uint32_t, const RowHeader& header) {
        if (header.last + std::max(spec_.ttl, spec_.window) < pins.now && !pins.Hold(header)) expired.push_back(id);
      });
      if (!expired.empty()) NoteMove(pins.now);
      for (const int64_t id : expired) RemoveKey(&shard, segment, id);
      shard.statistics[segment].evictions += expired.size();
    }
  }
}

int64_t HashTable::Remove(int64_t segment, absl::Span<const int64_t> ids) {
  version_.fetch_add(1);
  NoteMove(clock() + spec_.window);  // of rows that no rule protects
  int64_t removed = 0;
  for (const int64_t id : ids) {
    Shard* shard = &shards_[ShardOf(TableHash(id))];
    std::lock_guard<std::mutex> lock(shard->mutex);
    const int64_t before = shard->keys[segment].size();
    RemoveKey(shard, segment, id);
    removed += before - shard->keys[segment].size();
  }
  return removed;
}

void HashTable::Clear() {
  NoteMove(clock() + spec_.window);
  for (int s = 0; s < kShards; ++s) {
    Shard& shard = shards_[s];
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (int64_t segment = 0; segment < segments(); ++segment) {
      shard.keys[segment].ForEach([&](int64_t, uint32_t handle) { GiveBack(&shard, handle); });
      shard.keys[segment].Clear(&shard.retired);
      if (!shard.candidates.empty()) shard.candidates[segment].Clear();
      shard.changes.left[segment].clear();
      shard.unsynced[segment].clear();
      shard.statistics[segment] = {};
    }
    FreeRetired(&shard);
  }
  trained_.Clear();
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  accumulator_.Clear();
  waiting_since_.store(0, std::memory_order_release);
}

}  // namespace fusedrec
