#include "hash_table/cpu/hash_table.h"

#include <algorithm>
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

bool IsBefore(Moment since, const RowHeader& row) { return since.IsBefore(row.last, row.updated); }

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
  FUSEDREC_TRY(table->rows_.Open());
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

// Contents: all ids, or the ids whose rows changed since the last full save, the ids that left, the ids that wait for
// admission, and statistics. ChangeLog tells which ids may have changed; the headers of their rows decide.

void HashTable::Keys(int64_t segment, Moment since, const ParallelFor& parallel_for, std::vector<int64_t>* ids,
                     std::vector<int64_t>* handles) const {
  struct Found {
    std::vector<int64_t> ids, handles;
  };
  std::vector<Found> found(kShards);
  const bool recorded = rows_.change_log().Covers(since);
  const int64_t keys = size(segment) / kShards + 1;
  parallel_for(kShards, 20 * keys, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Shard& shard = rows_.shards()[s];
      Found& here = found[s];
      const auto take = [&](int64_t id, uint32_t handle) {
        here.ids.push_back(id);
        here.handles.push_back(handle);
      };
      std::lock_guard<std::mutex> lock(shard.mutex);
      if (since.IsBeginning()) {  // all ids: no header has to be read
        here.ids.reserve(shard.keys[segment].size());
        here.handles.reserve(shard.keys[segment].size());
        shard.keys[segment].ForEach(take);
      } else if (recorded) {
        std::vector<int64_t>& touched = shard.changes.touched[segment];
        KeepDistinct(&touched);
        for (const int64_t id : touched) {
          const uint32_t handle = shard.keys[segment].Find(id, TableHash(id));
          if (handle != kAbsent && IsBefore(since, *rows_.Header(handle))) take(id, handle);
        }
      } else {
        rows_.ForEachRow(shard, segment, [&](int64_t id, uint32_t handle, const RowHeader& header) {
          if (IsBefore(since, header)) take(id, handle);
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
  for (const Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (const int64_t id : shard.changes.left[segment]) {
      if (shard.keys[segment].Find(id, TableHash(id)) == kAbsent) gone.push_back(id);
    }
  }
  KeepDistinct(&gone);
  return gone;
}

void HashTable::ForgetTombstones() {
  rows_.change_log().Stop();
  for (Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.changes.Clear();
  }
  rows_.change_log().Begin({clock(), version()}, spec().record_tombstones);
}

void HashTable::Candidates(int64_t segment, std::vector<int64_t>* ids, std::vector<int64_t>* counts) const {
  std::vector<std::pair<int64_t, uint32_t>> candidates;
  for (const Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    if (shard.candidates.empty()) continue;
    shard.candidates[segment].ForEach([&](int64_t id, uint32_t count) { candidates.emplace_back(id, count); });
  }
  const auto hash = [](const auto& candidate) { return Mix64(static_cast<uint64_t>(candidate.first)); };
  std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) { return hash(a) < hash(b); });
  for (const auto& [id, count] : candidates) {
    ids->push_back(id);
    counts->push_back(count);
  }
}

absl::Status HashTable::SetCandidates(int64_t segment, absl::Span<const int64_t> ids, absl::Span<const int64_t> counts) {
  if (rows_.limits(segment).admission_count <= 1) return absl::OkStatus();
  for (size_t i = 0; i < ids.size(); ++i) {
    Shard* shard = &rows_.ShardWith(TableHash(ids[i]));
    std::lock_guard<std::mutex> lock(shard->mutex);
    FUSEDREC_TRY(shard->candidates[segment].Set(ids[i], static_cast<uint32_t>(counts[i])));
  }
  return absl::OkStatus();
}

SegmentStatistics HashTable::Statistics(int64_t segment) const {
  SegmentStatistics sum;
  for (const Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    const SegmentStatistics& part = shard.statistics[segment];
    sum.keys += shard.keys[segment].size();
    sum.hits += part.hits;
    sum.inserts += part.inserts;
    sum.evictions += part.evictions;
    sum.refused += part.refused;
    if (!shard.candidates.empty()) sum.candidates += shard.candidates[segment].size();
  }
  return sum;
}

int64_t HashTable::key_bytes() const {
  int64_t bytes = 0;
  for (const Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (const KeyIndex& keys : shard.keys) bytes += keys.bytes();
    for (const AdmissionFilter& candidates : shard.candidates) bytes += candidates.bytes();
  }
  return bytes;
}

}  // namespace fusedrec
