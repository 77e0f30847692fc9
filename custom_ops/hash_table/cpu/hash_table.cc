#include "hash_table/cpu/hash_table.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"

namespace fusedrec {
namespace {

uint64_t NextNumber() {
  static std::atomic<uint64_t> made{0};
  return Mix64(made.fetch_add(1) + 1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HashTable>> HashTable::Make(TableSpec spec) {
  if (spec.dim <= 0 || spec.seeds.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dim and the number of segments must be > 0, got ", spec.dim, " and ",
                                                   spec.seeds.size(), "."));
  }
  if (spec.limits.empty()) spec.limits.resize(spec.seeds.size());
  if (spec.limits.size() != spec.seeds.size()) {
    return absl::InvalidArgumentError(absl::StrCat("limits must be empty or one for each of the ", spec.seeds.size(),
                                                   " segments, got ", spec.limits.size(), "."));
  }
  std::unique_ptr<HashTable> table(new HashTable(std::move(spec)));
  const absl::Status opened = table->rows_.Open();
  if (!opened.ok()) return opened;
  return table;
}

HashTable::HashTable(TableSpec spec)
    : number_(NextNumber()),
      rows_(std::move(spec)),
      tier_(&rows_),
      evictor_(&rows_),
      demoter_(&rows_),
      records_(&rows_, &tier_),
      replicas_(&rows_, &tier_, &evictor_),
      accumulator_(rows_.spec().dim) {}

bool HashTable::IsHandle(int64_t handle) const {
  if (handle == kNoRow) return true;
  return handle >= 0 && handle <= 0xffffffff && rows_.store().IsHandle(static_cast<uint32_t>(handle));
}

int64_t HashTable::Evict(int64_t segment, int64_t count) {
  std::lock_guard<std::mutex> lock(rows_.room_mutex());
  rows_.NextVersion();
  return evictor_.EvictWorst(segment, count);
}

int64_t HashTable::Remove(int64_t segment, absl::Span<const int64_t> ids) {
  rows_.NextVersion();
  rows_.pins().NoteMoveOfAny();
  int64_t removed = 0;
  for (const int64_t id : ids) {
    Shard* shard = &rows_.ShardWith(TableHash(id));
    std::lock_guard<std::mutex> lock(shard->mutex);
    const int64_t before = shard->keys[segment].size();
    rows_.RemoveKey(shard, segment, id);
    removed += before - shard->keys[segment].size();
  }
  return removed;
}

void HashTable::Clear() {
  rows_.pins().NoteMoveOfAny();
  for (Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (int64_t segment = 0; segment < segments(); ++segment) {
      shard.keys[segment].ForEach([&](int64_t, uint32_t handle) { rows_.GiveBack(&shard, handle); });
      shard.keys[segment].Clear(&shard.retired);
      if (!shard.candidates.empty()) shard.candidates[segment].Clear();
      shard.changes.left[segment].clear();
      shard.unsynced[segment].clear();
      shard.statistics[segment] = {};
    }
    rows_.FreeRetired(&shard);
  }
  replicas_.Clear();
  std::lock_guard<std::mutex> lock(accumulator_mutex_);
  accumulator_.Clear();
  rows_.pins().EndWait();
}

}  // namespace fusedrec
