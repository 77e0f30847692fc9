#include "hash_table/cpu/hash_table.h"

#include "common/hash.h"

namespace fusedrec {

static uint64_t NextNumber() {
  static std::atomic<uint64_t> made{0};
  return Mix64(made.fetch_add(1) + 1);
}

static bool IsBefore(Moment since, const RowHeader& row) { return since.IsBefore(row.last, row.updated); }

HashTable::HashTable(TableSpec spec)
    : number_(NextNumber()), rows_(std::move(spec)), tier_(&rows_), evictor_(&rows_), demoter_(&rows_),
      records_(&rows_, &tier_), replicas_(&rows_, &tier_, &evictor_), accumulator_(rows_.spec().dim) {}

bool HashTable::IsHandle(int64_t handle) const {
  if (handle == kNoRow) return true;
  return handle >= 0 && handle <= 0xffffffff && rows_.store().IsHandle(static_cast<uint32_t>(handle));
}

absl::Status HashTable::CheckAhead(const TableCall& call, const Message& message, const Ahead& ahead) const {
  if (ahead.fingerprint != FingerprintOf(call, message)) {
    return Invalid(
        "message must be that of the look-ahead, of the same table, got other ids or another order. The table is what "
        "it was. Take a look-ahead and its lookup from one message.");
  }
  for (const int64_t handle : ahead.handles) {
    if (IsHandle(handle)) continue;
    return Invalid("handles_ahead must be of a TableLookAhead of this table, got ", handle, ".");
  }
  return absl::OkStatus();
}

absl::Status HashTable::CheckGradients(const Gradients& grads, uint32_t* clock) const {
  const int64_t rows = grads.handles.size();
  for (const int32_t number : grads.inverse) {
    if (number < 0 || number >= rows) {
      return Invalid(
          "inverse must lie in [0, ", rows, "), got ", number, ". Take handles and inverse from one TableLookup.");
    }
  }
  uint32_t first = 0;
  uint64_t sum = 0;
  for (const int64_t handle : grads.handles) {
    if (handle == kNoRow) continue;
    if (handle < 0 || !IsHandle(handle & 0xffffffff)) {
      return Invalid("handles must be of a TableLookup of this table, got ", handle, ".");
    }
    const uint32_t of_handle = static_cast<uint32_t>(handle >> 32);
    if (of_handle == 0 || (first != 0 && of_handle != first)) {
      return Invalid(
          "handles must be of one TableLookup, got some of lookup ", first, " and some of lookup ", of_handle, ".");
    }
    first = of_handle;
    sum += Mix64(static_cast<uint32_t>(handle));
  }
  // With other sums, some handles are missing or come twice, or the lookup was long ago. Only repeats are refused.
  if (rows_.pins().lookups().HandlesOf(first) != sum) {
    std::vector<int64_t> named;
    for (const int64_t handle : grads.handles) {
      if (handle != kNoRow) named.push_back(handle);
    }
    FUSEDREC_TRY(RequireDistinct("handles", named, "handles and inverse of one TableLookup."));
  }
  *clock = first;
  if (first == 0 || !IsStale(first)) return absl::OkStatus();
  return RowsAreStale(absl::StrCat("training lookup ", first));
}

absl::Status HashTable::Evict(const TableCall&, int64_t segment, int64_t count, int64_t* evicted) {
  std::lock_guard<std::mutex> lock(rows_.room_mutex());
  rows_.NextVersion();
  *evicted = evictor_.EvictWorst(segment, count);
  return absl::OkStatus();
}

absl::Status HashTable::Remove(const TableCall&, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) {
  if (rows_.pins().waiting_since() != 0) return SumsAreWaiting();
  rows_.NextVersion();
  rows_.pins().NoteMoveOfAny();
  *removed = 0;
  for (const int64_t id : ids) {
    Shard* shard = &rows_.ShardWith(TableHash(id));
    std::lock_guard<std::mutex> lock(shard->mutex);
    const int64_t before = shard->keys[segment].size();
    rows_.RemoveKey(shard, segment, id);
    *removed += before - shard->keys[segment].size();
  }
  return absl::OkStatus();
}

absl::Status HashTable::Clear(const TableCall&) {
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
  return absl::OkStatus();
}

// Contents: all ids, or the ids whose rows changed since the last full save, the ids that left, the ids that wait for
// admission, and statistics. ChangeLog tells which ids may have changed; the headers of their rows decide.

absl::Status HashTable::Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                             std::vector<int64_t>* handles) {
  struct Found {
    std::vector<int64_t> ids, handles;
  };
  std::vector<Found> found(kShards);
  const bool recorded = rows_.change_log().Covers(since);
  const int64_t keys = size(segment) / kShards + 1;
  call.parallel_for(kShards, 20 * keys, [&](int64_t begin, int64_t end) {
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
  return absl::OkStatus();
}

absl::Status HashTable::ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) {
  for (const int64_t handle : handles) {
    if (handle >= 0 && IsHandle(handle)) continue;
    return Invalid("handles must be of a TableKeys of this table, got ", handle, ".");
  }
  WantHugePages(records, handles.size() * record_bytes());  // a save holds training up meanwhile
  records_.Read(handles, call.parallel_for, records);
  return absl::OkStatus();
}

absl::Status HashTable::Tombstones(const TableCall&, int64_t segment, std::vector<int64_t>* ids) {
  for (const Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    for (const int64_t id : shard.changes.left[segment]) {
      if (shard.keys[segment].Find(id, TableHash(id)) == kAbsent) ids->push_back(id);
    }
  }
  KeepDistinct(ids);
  return absl::OkStatus();
}

void HashTable::ForgetTombstones() {
  rows_.change_log().Stop();
  for (Shard& shard : rows_.shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.changes.Clear();
  }
  rows_.change_log().Begin(Clock(), spec().record_tombstones);
}

absl::Status HashTable::Candidates(const TableCall&, int64_t segment, std::vector<int64_t>* ids,
                                   std::vector<int64_t>* counts) {
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
  return absl::OkStatus();
}

absl::Status HashTable::SetCandidates(const TableCall&, int64_t segment, absl::Span<const int64_t> ids,
                                      absl::Span<const int64_t> counts) {
  if (rows_.limits(segment).admission_count <= 1) return absl::OkStatus();
  for (size_t i = 0; i < ids.size(); ++i) {
    Shard* shard = &rows_.ShardWith(TableHash(ids[i]));
    std::lock_guard<std::mutex> lock(shard->mutex);
    FUSEDREC_TRY(shard->candidates[segment].Set(ids[i], static_cast<uint32_t>(counts[i])));
  }
  return absl::OkStatus();
}

absl::Status HashTable::ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                                    float* numbers, int64_t size) {
  FUSEDREC_TRY(RequireTrainable(spec()));
  replicas_.ReadNumbers(ids, splits, call.parallel_for, numbers);
  std::fill(numbers + ids.size() * width(), numbers + size * width(), 0.0f);
  return absl::OkStatus();
}

absl::Status HashTable::Statistics(TableStatistics* statistics) {
  for (int64_t s = 0; s < segments(); ++s) statistics->segments.push_back(StatisticsOf(s));
  statistics->bytes = {key_bytes(), row_bytes(0), row_bytes(1), rows_in_pool(0), rows_in_pool(1)};
  return absl::OkStatus();
}

SegmentStatistics HashTable::StatisticsOf(int64_t segment) const {
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
