// Rows as checkpoints hold them, sizes, statistics.
//
// A record is packed, little-endian: last, count, updated, pool (uint32 each) | row D | element-wise slots k * D |
// row-wise slots. Numbers have the table's storage; rows of a 16-bit pool beside a float32 one are widened, which loses
// nothing, and `pool` says where they go back to.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"

namespace fusedrec {
namespace {

constexpr int kRecordHeader = 4 * sizeof(uint32_t);

}  // namespace

int HashTable::record_bytes() const {
  const RowFormat& row_format = format(0);
  return kRecordHeader + spec_.dim * BytesOf(row_format.storage()) +
         row_format.wide_slots() * spec_.dim * BytesOf(row_format.slot_storage()) + 4 * row_format.scalar_slots();
}

void HashTable::ReadRecords(absl::Span<const int64_t> handles, const ParallelFor& parallel_for, char* records) const {
  constexpr int kAhead = 8;
  const int64_t size = record_bytes();
  const RowFormat& first = format(0);
  const int row_bytes = spec_.dim * BytesOf(first.storage());
  const int wide_bytes = first.wide_slots() * spec_.dim * BytesOf(first.slot_storage());
  parallel_for(handles.size(), 100 + size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) rows_.Fetch(static_cast<uint32_t>(handles[i + kAhead]));
      const uint32_t handle = static_cast<uint32_t>(handles[i]);
      char *row = rows_.Row(handle), *out = records + i * size;
      const RowHeader& header = *RowFormat::Header(row);
      const uint32_t about[4] = {header.last, header.count, header.updated, static_cast<uint32_t>(RowStore::PoolOf(handle))};
      std::memcpy(out, about, kRecordHeader);
      const RowFormat& row_format = format(RowStore::PoolOf(handle));
      if (row_format.storage() != first.storage()) {
        row_format.Load(row, reinterpret_cast<float*>(out + kRecordHeader));
        continue;
      }
      std::memcpy(out + kRecordHeader, RowFormat::Payload(row), row_bytes + wide_bytes);
      std::memcpy(out + kRecordHeader + row_bytes + wide_bytes, row_format.Scalars(row), 4 * first.scalar_slots());
    }
  });
}

// Row and slots.
void HashTable::WriteRecordNumbers(const char* record, uint32_t handle) {
  char* row = rows_.Row(handle);
  const RowFormat &first = format(0), &row_format = format(RowStore::PoolOf(handle));
  if (row_format.storage() != first.storage()) {
    std::vector<float> numbers(first.numbers());
    std::memcpy(numbers.data(), record + kRecordHeader, 4 * numbers.size());
    row_format.Store(numbers.data(), RowFormat::Header(row)->updated, row);
    return;
  }
  const int row_bytes = spec_.dim * BytesOf(first.storage());
  const int wide_bytes = first.wide_slots() * spec_.dim * BytesOf(first.slot_storage());
  std::memcpy(RowFormat::Payload(row), record + kRecordHeader, row_bytes + wide_bytes);
  std::memcpy(row_format.Scalars(row), record + kRecordHeader + row_bytes + wide_bytes, 4 * first.scalar_slots());
}

absl::Status HashTable::WriteRecord(Shard* shard, int64_t segment, int64_t id, const char* record) {
  uint32_t about[4];
  std::memcpy(about, record, kRecordHeader);
  // A lookup recognizes its rows by its clock, so its clock must be ahead of the clocks in all headers.
  lookups_.AdvanceTo(about[0]);
  int pool = rows_.HasPool(1) && about[3] == 1 ? 1 : 0;
  if (memory_rows_ > 0) pool = rows_in_pool(0) < memory_rows_ ? 0 : 1;
  uint32_t handle = shard->keys[segment].Find(id, TableHash(id));
  if (handle != kAbsent && RowStore::PoolOf(handle) != pool) {
    GiveBack(shard, shard->keys[segment].Remove(id, TableHash(id)));
    handle = kAbsent;
  }
  if (handle == kAbsent) {
    const absl::Status taken = TakeRow(shard, pool, &handle);
    if (!taken.ok()) return taken;
    shard->keys[segment].Insert(id, TableHash(id), handle);
  }
  change_log_.Touch(&shard->changes, segment, id, 0, shard->keys[segment].size());
  *rows_.Header(handle) = {about[0], 0, about[1], about[2]};
  WriteRecordNumbers(record, handle);
  return absl::OkStatus();
}

absl::Status HashTable::WriteRecords(int64_t segment, absl::Span<const int64_t> ids, const char* records,
                                     const ParallelFor& parallel_for) {
  NoteMove(clock() + spec_.window);  // a row may come back into another pool
  moves_.fetch_add(1);               // and with another value, of an older version
  std::vector<std::vector<int64_t>> of_shard(kShards);
  for (size_t i = 0; i < ids.size(); ++i) of_shard[ShardOf(TableHash(ids[i]))].push_back(i);
  const int64_t size = record_bytes();
  std::vector<absl::Status> failed(kShards);
  parallel_for(kShards, (ids.size() / kShards + 1) * (200 + size), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Shard* shard = &shards_[s];
      std::lock_guard<std::mutex> lock(shard->mutex);
      failed[s] = shard->keys[segment].Reserve(of_shard[s].size(), &shard->retired);
      for (size_t n = 0; n < of_shard[s].size() && failed[s].ok(); ++n) {
        const int64_t i = of_shard[s][n];
        failed[s] = WriteRecord(shard, segment, ids[i], records + i * size);
      }
      FreeRetired(shard);
    }
  });
  for (const absl::Status& status : failed) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void HashTable::WriteTrained(absl::Span<const SegmentId> keys, const char* records, const ParallelFor& parallel_for) {
  constexpr int kAhead = 8;
  const int64_t size = record_bytes();
  std::vector<std::vector<int64_t>> of_shard(kShards);
  for (size_t i = 0; i < keys.size(); ++i) of_shard[ShardOf(TableHash(keys[i].id))].push_back(i);
  parallel_for(kShards, (keys.size() / kShards + 1) * (200 + size), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Shard* shard = &shards_[s];
      std::lock_guard<std::mutex> lock(shard->mutex);
      const auto find = [&](int64_t i) {
        return shard->keys[keys[i].segment].Find(keys[i].id, TableHash(keys[i].id));
      };
      std::vector<uint32_t> handles;
      for (const int64_t i : of_shard[s]) handles.push_back(find(i));
      for (size_t n = 0; n < handles.size(); ++n) {
        if (n + kAhead < handles.size() && handles[n + kAhead] != kAbsent) rows_.Fetch(handles[n + kAhead]);
        if (handles[n] == kAbsent) continue;
        const char* record = records + of_shard[s][n] * size;
        uint32_t about[4];
        std::memcpy(about, record, kRecordHeader);
        RowHeader* header = rows_.Header(handles[n]);
        if (about[2] <= header->updated) continue;  // it was looked up, not trained
        header->updated = about[2];
        WriteRecordNumbers(record, handles[n]);
      }
    }
  });
}

void HashTable::Candidates(int64_t segment, std::vector<int64_t>* ids, std::vector<int64_t>* counts) const {
  std::vector<std::pair<int64_t, uint32_t>> candidates;
  for (int s = 0; s < kShards && spec_.admission_count > 1; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    shards_[s].candidates[segment].ForEach([&](int64_t id, uint32_t count) { candidates.emplace_back(id, count); });
  }
  const auto hash = [](const auto& candidate) { return Mix64(static_cast<uint64_t>(candidate.first)); };
  std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) { return hash(a) < hash(b); });
  for (const auto& [id, count] : candidates) {
    ids->push_back(id);
    counts->push_back(count);
  }
}

absl::Status HashTable::SetCandidates(int64_t segment, absl::Span<const int64_t> ids, absl::Span<const int64_t> counts) {
  for (size_t i = 0; i < ids.size() && spec_.admission_count > 1; ++i) {
    Shard* shard = &shards_[ShardOf(TableHash(ids[i]))];
    std::lock_guard<std::mutex> lock(shard->mutex);
    const absl::Status set = shard->candidates[segment].Set(ids[i], static_cast<uint32_t>(counts[i]));
    if (!set.ok()) return set;
  }
  return absl::OkStatus();
}

SegmentStatistics HashTable::Statistics(int64_t segment) const {
  SegmentStatistics sum;
  for (int s = 0; s < kShards; ++s) {
    const Shard& shard = shards_[s];
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

int64_t HashTable::size(int64_t segment) const { return Statistics(segment).keys; }

int64_t HashTable::key_bytes() const {
  int64_t bytes = 0;
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    for (const KeyIndex& keys : shards_[s].keys) bytes += keys.bytes();
    for (const AdmissionFilter& candidates : shards_[s].candidates) bytes += candidates.bytes();
  }
  return bytes;
}

void HashTable::SetClock(uint32_t clock, uint32_t version) {
  lookups_.SetClock(clock);
  version_.store(version);
  moves_.fetch_add(1);  // versions of before are of another count
  change_log_.Stop();  // it counts by the clock of before
  moved_at_.store(int64_t{clock} + spec_.window);  // handles of before are of another clock
}

}  // namespace fusedrec
