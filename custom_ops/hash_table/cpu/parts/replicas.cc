#include "hash_table/cpu/parts/replicas.h"

#include "common/hash.h"
#include "hash_table/cpu/parts/message_runs.h"

namespace fusedrec {

void Replicas::NoteTrained(const Message& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t segments = rows_->segments();
  for (const MessageRun& run : RunsOf(message, segments, message.num_ids)) {
    const int64_t* ids = &message.entries[run.entry];
    trained_[run.segment].insert(trained_[run.segment].end(), ids, ids + run.count);
  }
  for (int64_t segment = 0; segment < segments; ++segment) {
    constexpr size_t kAlwaysKept = 1 << 16;
    if (trained_[segment].size() < kAlwaysKept + 2 * distinct_[segment]) continue;
    KeepDistinct(&trained_[segment]);
    distinct_[segment] = trained_[segment].size();
  }
}

IdsBySegment Replicas::TakeTrained() {
  IdsBySegment taken(rows_->segments());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    trained_.swap(taken);
    distinct_.assign(rows_->segments(), 0);
  }
  for (std::vector<int64_t>& ids : taken) KeepDistinct(&ids);
  return taken;
}

absl::Status Replicas::TakeUnsynced(const FusedrecUnsyncedSink& sink) {
  const IdsBySegment trained = TakeTrained();
  std::vector<int64_t> counts, ids, headers;
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const size_t before = ids.size();
    for (const int64_t id : trained[segment]) {
      const uint64_t hash = TableHash(id);
      Shard& shard = rows_->ShardWith(hash);
      std::lock_guard<std::mutex> lock(shard.mutex);
      const uint32_t handle = shard.keys[segment].Find(id, hash);
      if (handle == kAbsent) continue;  // refused by admission, or removed since
      const RowHeader& header = *rows_->Header(handle);
      ids.push_back(id);
      headers.push_back(int64_t{header.last} << 32 | header.count);
    }
    counts.push_back(ids.size() - before);
  }
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    std::vector<int64_t> gone;
    for (Shard& shard : rows_->shards()) {
      std::lock_guard<std::mutex> lock(shard.mutex);
      for (const int64_t id : shard.unsynced[segment]) {
        if (shard.keys[segment].Find(id, TableHash(id)) == kAbsent) gone.push_back(id);
      }
      shard.unsynced[segment].clear();
    }
    KeepDistinct(&gone);
    ids.insert(ids.end(), gone.begin(), gone.end());
    counts.push_back(gone.size());
  }
  headers.resize(ids.size(), 0);
  int64_t *message_out, *headers_out;
  if (sink.allocate(sink.context, counts.size() + ids.size(), ids.size(), &message_out, &headers_out) != 0) {
    return absl::ResourceExhaustedError("there is no memory for the ids that this replica trained or removed.");
  }
  std::copy(ids.begin(), ids.end(), std::copy(counts.begin(), counts.end(), message_out));
  std::copy(headers.begin(), headers.end(), headers_out);
  return absl::OkStatus();
}

void Replicas::ReadNumbers(absl::Span<const int64_t> ids, absl::Span<const int64_t> segment_splits,
                           const ParallelFor& parallel_for, float* numbers) const {
  const int64_t width = rows_->format(0).numbers();
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const int64_t first = segment_splits[segment];
    parallel_for(segment_splits[segment + 1] - first, 200 + width, [&](int64_t begin, int64_t end) {
      const ShardedRows::Reader reader(rows_);
      std::vector<char> initial(rows_->format(rows_->new_pool()).stride());
      for (int64_t i = first + begin; i < first + end; ++i) {
        const uint64_t hash = TableHash(ids[i]);
        const uint32_t handle = rows_->ShardWith(hash).keys[segment].Find(ids[i], hash);
        if (handle != kAbsent) {
          rows_->format(RowStore::PoolOf(handle)).Load(rows_->Row(handle), numbers + i * width);
        } else {  // through the storage, with the rounding of a lookup
          rows_->WriteInitial(segment, ids[i], rows_->new_pool(), initial.data());
          rows_->format(rows_->new_pool()).Load(initial.data(), numbers + i * width);
        }
      }
    });
  }
}

absl::Status Replicas::WriteNumbers(Shard* shard, int64_t segment, int64_t id, const float* numbers, int64_t header,
                                    uint32_t step) {
  const uint64_t hash = TableHash(id);
  uint32_t handle = shard->keys[segment].Find(id, hash);
  if (handle == kAbsent) FUSEDREC_TRY(rows_->MakeRow(shard, segment, id, tier_->PoolWithRoom(), &handle));
  char* row = rows_->Row(handle);
  rows_->change_log().Touch(&shard->changes, segment, id, 0, shard->keys[segment].size());
  RowHeader* about = RowFormat::Header(row);
  const uint32_t last = static_cast<uint32_t>(header >> 32), count = static_cast<uint32_t>(header);
  if (about->last < last) {  // The count may be smaller: the row has left other replicas and come back.
    about->last = last;
    about->count = count;
  } else {  // A lookup under way, which the row's pin needs (pinned_rows.h), is not among the replicas' counters.
    about->count = std::max(about->count, count);
  }
  about->updated = rows_->version();
  rows_->format(RowStore::PoolOf(handle)).Store(numbers, step, row);
  return absl::OkStatus();
}

absl::Status Replicas::Merge(const FusedrecMerge& in) {
  for (int64_t s = 0; s < rows_->segments(); ++s) {
    const absl::Span<const int64_t> ids(in.ids + in.id_splits[s], in.id_splits[s + 1] - in.id_splits[s]);
    FUSEDREC_TRY(RequireDistinct("ids", ids, "one row of each id."));
  }
  std::lock_guard<std::mutex> lock(rows_->room_mutex());
  rows_->NextVersion();
  const Pins pins = rows_->pins().Current();
  const int64_t width = rows_->format(0).numbers();
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    for (int64_t i = in.left_splits[segment]; i < in.left_splits[segment + 1]; ++i) {
      Shard* shard = &rows_->ShardWith(TableHash(in.left[i]));
      std::lock_guard<std::mutex> shard_lock(shard->mutex);
      const uint32_t handle = shard->keys[segment].Find(in.left[i], TableHash(in.left[i]));
      if (handle == kAbsent || pins.Hold(*rows_->Header(handle))) continue;
      rows_->pins().NoteMove(pins);
      rows_->RemoveKey(shard, segment, in.left[i]);
      shard->unsynced[segment].pop_back();  // no replica needs the change
    }
    for (int64_t i = in.id_splits[segment]; i < in.id_splits[segment + 1]; ++i) {
      Shard* shard = &rows_->ShardWith(TableHash(in.ids[i]));
      std::lock_guard<std::mutex> shard_lock(shard->mutex);
      FUSEDREC_TRY(WriteNumbers(shard, segment, in.ids[i], in.numbers + i * width, in.headers[i], in.step));
    }
  }
  // Each replica has kept its limit, but not with the same rows.
  absl::Status kept;
  for (int64_t segment = 0; segment < rows_->segments(); ++segment) {
    const int64_t max_rows = rows_->limits(segment).max_rows;
    const int64_t excess = max_rows > 0 ? rows_->size(segment) - max_rows : 0;
    if (excess > 0 && evictor_->EvictWorst(segment, excess) < excess) kept.Update(ReplicasAreFull(rows_->spec(), segment));
  }
  return kept;
}

}  // namespace fusedrec
