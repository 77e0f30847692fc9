#include "hash_table/cuda/kernels/row_transfers.h"

#include <algorithm>

#include "hash_table/cuda/kernels/device_form.h"

namespace fusedrec {
namespace {

// What one thread copies at a time: so many bytes of records, but at least so many rows, because rows lie anywhere in
// memory. Less is not worth waking a thread.
constexpr int64_t kShardBytes = int64_t{1} << 16, kLeastRows = 128;

}  // namespace

absl::Status RowTransfers::StatusOf(int answer) const {
  return DeviceTableStatus(answer, table_->spec(), "rows of a batch");
}

absl::Status RowTransfers::MakeRoom(std::initializer_list<Parcel*> parcels) const {
  const int64_t size = table_->records().bytes();
  int64_t bytes = 0;
  for (const Parcel* parcel : parcels) bytes += parcel->handles.size() * size;
  if (bytes == 0) return absl::OkStatus();  // no copies to wait for
  char* memory;
  const absl::Status room = StatusOf(fusedrec_buffer_host_memory(buffer_, bytes, &memory));
  if (!room.ok()) return room;
  for (Parcel* parcel : parcels) {
    parcel->records = memory;
    memory += parcel->handles.size() * size;
  }
  return room;
}

void RowTransfers::Pack(const ParallelFor& parallel_for, Parcel* parcel) const {
  const RowRecords& records = table_->records();
  const absl::Span<const int64_t> handles = parcel->handles;
  const int64_t rows = handles.size(), size = records.bytes();
  const int64_t of_shard = std::max(kShardBytes / size, kLeastRows), shards = (rows + of_shard - 1) / of_shard;
  parallel_for(shards, of_shard * (100 + size), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * of_shard, last = std::min(end * of_shard, rows);
    records.Read(handles.subspan(first, last - first), SerialFor, parcel->records + first * size);
  });
}

absl::Status RowTransfers::Prefetch(const Parcel& parcel, const FusedrecHotRows& hot, void* stream) {
  const absl::Status done = StatusOf(
      fusedrec_buffer_prefetch(buffer_, parcel.ids.data(), parcel.splits.data(), parcel.records, &hot, stream));
  if (done.ok()) CountSent(parcel);
  return done;
}

absl::Status RowTransfers::PrefetchMore(const Parcel& parcel, void* stream) {
  const absl::Status done = StatusOf(
      fusedrec_buffer_prefetch_more(buffer_, parcel.ids.data(), parcel.splits.data(), parcel.records, stream));
  if (done.ok()) CountSent(parcel);
  return done;
}

absl::Status RowTransfers::Advance(const Parcel& late, const FusedrecPoolMoves* moves, void* stream) {
  const absl::Status done = StatusOf(fusedrec_buffer_advance(buffer_, late.ids.data(), late.splits.data(), late.records,
                                                             moves, nullptr, stream));
  if (done.ok()) CountSent(late);
  return done;
}

template <typename Read>
absl::Status RowTransfers::Write(const std::vector<SegmentId>& rows, const Read& read,
                                 const ParallelFor& parallel_for) {
  const char* records = nullptr;
  const absl::Status done = StatusOf(read(&records));
  if (!done.ok()) return done;
  table_->records().WriteTrained(rows, records, parallel_for);
  for (const SegmentId& row : rows) ++traffic_[row.segment].returned;
  return done;
}

absl::Status RowTransfers::WriteBack(const std::vector<SegmentId>& rows, const ParallelFor& parallel_for) {
  return Write(rows, [this](const char** records) { return fusedrec_buffer_write_back(buffer_, records); }, parallel_for);
}

absl::Status RowTransfers::TakeActiveBack(const std::vector<SegmentId>& rows, const ParallelFor& parallel_for,
                                          void* stream) {
  const auto read = [=](const char** records) { return fusedrec_buffer_read_active(buffer_, records, stream); };
  return Write(rows, read, parallel_for);
}

absl::Status RowTransfers::TakeHotBack(HotRows* hot, size_t most, const ParallelFor& parallel_for, void* stream) {
  const std::vector<int64_t> newer = hot->Newer();
  for (size_t begin = 0, end; begin < newer.size(); begin = end) {
    end = std::min(begin + most, newer.size());
    const int64_t* const slots = newer.data() + begin;
    std::vector<SegmentId> keys;
    for (size_t i = begin; i < end; ++i) keys.push_back(hot->key(newer[i]));
    const char* written = nullptr;
    const auto read = [&](const char** records) {
      const int answer = fusedrec_buffer_read_hot(buffer_, slots, keys.size(), records, stream);
      written = *records;
      return answer;
    };
    const absl::Status done = Write(keys, read, parallel_for);
    if (!done.ok()) return done;
    for (size_t i = 0; i < keys.size(); ++i) {
      hot->NoteWritten(slots[i], RowRecords::UpdatedOf(written + i * table_->records().bytes()));
    }
  }
  return absl::OkStatus();
}

void RowTransfers::CountHits(const std::vector<int64_t>& splits) {
  for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].hits += splits[s + 1] - splits[s];
}

void RowTransfers::CountSent(const Parcel& parcel) {
  for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].sent += parcel.splits[s + 1] - parcel.splits[s];
}

std::vector<int64_t> RowTransfers::Traffic() const {
  const int64_t bytes = table_->records().bytes();
  std::vector<int64_t> traffic;
  for (const RowTraffic& rows : traffic_) {
    traffic.insert(traffic.end(), {rows.hits, rows.sent * bytes, rows.returned * bytes});
  }
  return traffic;
}

}  // namespace fusedrec
