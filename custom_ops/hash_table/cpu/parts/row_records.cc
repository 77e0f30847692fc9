#include "hash_table/cpu/parts/row_records.h"

#include "common/hash.h"

namespace fusedrec {
namespace {

constexpr int kAhead = 8;  // rows between the fetch of a row and its copy

// The counters of a row, as its record begins.
struct Counters {
  uint32_t last, count, updated, pool;
};
static_assert(sizeof(Counters) == kRecordHeader);

Counters CountersOf(const char* record) {
  Counters counters;
  std::memcpy(&counters, record, sizeof(Counters));
  return counters;
}

}  // namespace

uint32_t RowRecords::UpdatedOf(const char* record) { return CountersOf(record).updated; }

void RowRecords::Read(absl::Span<const int64_t> handles, const ParallelFor& parallel_for, char* records) const {
  const int64_t size = bytes();
  const int row_and_wide = layout().packed_bytes;
  const RowFormat& first = rows_->format(0);
  parallel_for(handles.size(), 100 + size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) rows_->store().Fetch(static_cast<uint32_t>(handles[i + kAhead]));
      const uint32_t handle = static_cast<uint32_t>(handles[i]);
      char *row = rows_->Row(handle), *out = records + i * size;
      const RowHeader& header = *RowFormat::Header(row);
      const int pool = RowStore::PoolOf(handle);
      const Counters counters{header.last, header.count, header.updated, static_cast<uint32_t>(pool)};
      std::memcpy(out, &counters, sizeof(Counters));
      out += sizeof(Counters);
      const RowFormat& format = rows_->format(pool);
      if (format.storage() != first.storage()) {
        format.Load(row, reinterpret_cast<float*>(out));
        continue;
      }
      std::memcpy(out, RowFormat::Payload(row), row_and_wide);
      std::memcpy(out + row_and_wide, format.Scalars(row), 4 * first.scalar_slots());
    }
  });
}

// Row and slots.
void RowRecords::WriteNumbers(const char* record, uint32_t handle) {
  char* row = rows_->Row(handle);
  const char* from = record + sizeof(Counters);
  const RowFormat &first = rows_->format(0), &format = rows_->format(RowStore::PoolOf(handle));
  if (format.storage() != first.storage()) {
    std::vector<float> numbers(first.numbers());
    std::memcpy(numbers.data(), from, 4 * numbers.size());
    format.Store(numbers.data(), RowFormat::Header(row)->updated, row);
    return;
  }
  const int row_and_wide = layout().packed_bytes;
  std::memcpy(RowFormat::Payload(row), from, row_and_wide);
  std::memcpy(format.Scalars(row), from + row_and_wide, 4 * first.scalar_slots());
}

template <typename IdOf, typename Visit>
void RowRecords::ForEachShard(int64_t n, const IdOf& id_of, const ParallelFor& parallel_for, const Visit& visit) {
  std::vector<std::vector<int64_t>> places(kShards);
  for (int64_t i = 0; i < n; ++i) places[ShardOf(TableHash(id_of(i)))].push_back(i);
  parallel_for(kShards, (n / kShards + 1) * (200 + bytes()), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Shard* shard = &rows_->shards()[s];
      std::lock_guard<std::mutex> lock(shard->mutex);
      visit(shard, places[s]);
    }
  });
}

absl::Status RowRecords::WriteOne(Shard* shard, int64_t segment, int64_t id, const char* record) {
  const Counters counters = CountersOf(record);
  // A lookup recognizes its rows by its clock, so its clock must be ahead of the clocks in all headers.
  rows_->pins().lookups().AdvanceTo(counters.last);
  const bool second = tier_->is_on() ? tier_->PoolWithRoom() == 1 : rows_->store().HasPool(1) && counters.pool == 1;
  const int pool = second ? 1 : 0;
  KeyIndex& keys = shard->keys[segment];
  const uint32_t old = keys.Find(id, TableHash(id));
  uint32_t handle = old;
  if (old == kAbsent || RowStore::PoolOf(old) != pool) {  // the new place first: without memory the old row stays
    if (old == kAbsent) FUSEDREC_TRY(keys.Reserve(1, &shard->retired));
    FUSEDREC_TRY(rows_->TakeRow(shard, pool, &handle));
  }
  if (old == kAbsent) {
    keys.Insert(id, TableHash(id), handle);
  } else if (handle != old) {
    keys.Replace(id, TableHash(id), handle);
    rows_->GiveBack(shard, old);
  }
  rows_->change_log().Touch(&shard->changes, segment, id, 0, shard->keys[segment].size());
  *rows_->Header(handle) = {counters.last, 0, counters.count, counters.updated};
  WriteNumbers(record, handle);
  return absl::OkStatus();
}

absl::Status RowRecords::Write(int64_t segment, absl::Span<const int64_t> ids, const char* records,
                            const ParallelFor& parallel_for) {
  if (ids.empty()) return absl::OkStatus();
  rows_->pins().NoteMoveOfAny();  // a row may come back into another pool, and gradients are of the values before
  rows_->EndLookAheads();         // and with another value, of an older version
  const int64_t size = bytes();
  std::vector<absl::Status> failed(kShards);
  const auto write = [&](Shard* shard, const std::vector<int64_t>& places) {
    absl::Status& done = failed[shard - rows_->shards().data()];
    for (size_t n = 0; n < places.size() && done.ok(); ++n) {
      done = WriteOne(shard, segment, ids[places[n]], records + places[n] * size);
    }
    rows_->FreeRetired(shard);
  };
  ForEachShard(ids.size(), [&](int64_t i) { return ids[i]; }, parallel_for, write);
  for (const absl::Status& status : failed) FUSEDREC_TRY(status);
  return absl::OkStatus();
}

void RowRecords::WriteTrained(absl::Span<const SegmentId> keys, const char* records, const ParallelFor& parallel_for) {
  const int64_t size = bytes();
  const auto write = [&](Shard* shard, const std::vector<int64_t>& places) {
    std::vector<uint32_t> handles;
    for (const int64_t i : places) {
      handles.push_back(shard->keys[keys[i].segment].Find(keys[i].id, TableHash(keys[i].id)));
    }
    for (size_t n = 0; n < handles.size(); ++n) {
      if (n + kAhead < handles.size() && handles[n + kAhead] != kAbsent) rows_->store().Fetch(handles[n + kAhead]);
      if (handles[n] == kAbsent) continue;
      const char* record = records + places[n] * size;
      const uint32_t updated = UpdatedOf(record);
      RowHeader* header = rows_->Header(handles[n]);
      if (updated <= header->updated) continue;  // it was looked up, not trained
      header->updated = updated;
      WriteNumbers(record, handles[n]);
    }
  };
  ForEachShard(keys.size(), [&](int64_t i) { return keys[i].id; }, parallel_for, write);
}

}  // namespace fusedrec
