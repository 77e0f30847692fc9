#include "hash_table/cuda/host_rows.h"

#include <algorithm>
#include <utility>

#include "common/cuda_api.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

// What one thread copies at a time: so many bytes of records, but at least so many rows, because rows lie anywhere in
// memory. Less is not worth waking a thread.
constexpr int64_t kShardBytes = int64_t{1} << 16, kLeastRows = 128;

// counted: what has happened by then.
absl::Status OtherMessage(const char* counted) {
  return absl::InvalidArgumentError(absl::StrCat("message must be that of the look-ahead, got another one. ", counted,
                                                 " Take a look-ahead and its lookup from one message."));
}

}  // namespace

absl::Status HostRowsTable::Make(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                                 std::unique_ptr<Table>* made) {
  const DeviceTexts texts(spec);
  auto table = HashTable::Make(spec);
  if (!table.ok()) return table.status();
  FusedrecDeviceBuffer* buffer;
  const int answer = fusedrec_buffer_create(&texts, &allocator, &buffer, stream);
  if (answer != 0) return DeviceTableStatus(answer, spec, spec.hot_rows > 0 ? "its hot_rows_per_rank" : "its segments");
  made->reset(new HostRowsTable(*std::move(table), buffer));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_lock<std::mutex>> HostRowsTable::Begin(const TableCall& call, Access access) {
  std::unique_lock<std::mutex> lock(mutex_);
  absl::Status done = access == Access::kAsTheyAre ? absl::OkStatus() : TakeBack(call);
  if (done.ok() && access == Access::kChange) {
    done = DropBatches(call);
    if (done.ok()) hot_.Clear();
  }
  if (!done.ok()) return done;
  return {std::move(lock)};
}

absl::Status HostRowsTable::Receive(const TableCall& call, const Message& message, NextBatch* seen) const {
  *seen = NextBatch(message);
  const absl::Status copied = StatusOf(fusedrec_copy_to_host(seen->entries.data(), message.entries.data(),
                                                             seen->entries.size() * sizeof(int64_t), call.stream));
  return copied.ok() ? CheckMessage(seen->entries, seen->splits, segments()) : copied;
}

absl::Status HostRowsTable::ReadAhead(const TableCall& call, NextBatch seen) {
  seen_ = NextBatch();
  table_->LookAhead(seen.message(), call.parallel_for, {}, absl::MakeSpan(seen.handles), &seen.version, &seen.moves);
  seen.fingerprint = FingerprintOf(seen.message(), segments(), call.parallel_for);
  seen.GroupBySegment(segments());
  seen_ = std::move(seen);

  Parcel parcel, more;
  seen_.ChooseAhead(*table_, hot_, waiting_, &parcel, &more);
  absl::Status done = MakeRoom({&parcel, &more});
  if (!done.ok()) return done;
  // These rows go to the device while the waiting rows come back.
  Pack(call.parallel_for, &parcel);
  const FusedrecHotRows hot = seen_.hot.view();
  done = CountSent(fusedrec_buffer_prefetch(buffer_, parcel.ids.data(), parcel.splits.data(), parcel.records, &hot,
                                            call.stream),
                   parcel);
  if (done.ok()) done = WriteBack(call);
  if (!done.ok()) return done;
  Pack(call.parallel_for, &more);
  done = CountSent(
      fusedrec_buffer_prefetch_more(buffer_, more.ids.data(), more.splits.data(), more.records, call.stream), more);
  if (done.ok()) seen_.look_ahead = ++look_aheads_;
  return done;
}

absl::Status HostRowsTable::LookAhead(const TableCall& call, const Message& message, const RowsOut&, absl::Span<int64_t>,
                                      Ahead* mark) {
  NextBatch seen(message);
  std::copy(message.entries.begin(), message.entries.end(), seen.entries.begin());
  const absl::Status done = ReadAhead(call, std::move(seen));
  mark->version = seen_.look_ahead;
  return done;
}

absl::Status HostRowsTable::Lookup(const TableCall& call, const Message& message, const Ahead* ahead, const RowsOut& rows,
                                   int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  absl::Status done = DropLeft(call);
  if (done.ok() && (ahead == nullptr || ahead->version == 0 || ahead->version != seen_.look_ahead)) {
    NextBatch seen;
    done = Receive(call, message, &seen);
    if (done.ok()) done = ReadAhead(call, std::move(seen));
  }
  if (!done.ok()) return done;
  if (seen_.entries.size() != message.entries.size()) return OtherMessage("The table is what it was.");

  // The rows of the batch that ends are all there.
  HotRows::Plan plan;
  if (hot_.is_on()) done = hot_.PlanEnd(active_, is_trained_, *table_, &plan);
  if (!done.ok()) return done;

  const Message on_host = seen_.message();
  const Ahead found_ahead = seen_.ahead();
  const uint32_t clock = table_->clock(), version = table_->version();
  std::vector<int32_t> numbers(on_host.num_ids);
  std::vector<int64_t> found;
  done = table_->Lookup(on_host, call.parallel_for, {}, absl::MakeSpan(numbers), &found, nullptr, &found_ahead);
  Parcel late;
  if (done.ok()) {
    seen_.ChooseLate(*table_, call.parallel_for, numbers, found, &late);
    done = MakeRoom({&late});
  }
  if (done.ok()) {
    Pack(call.parallel_for, &late);
    const FusedrecPoolMoves moves = plan.Moves();
    done = CountSent(fusedrec_buffer_advance(buffer_, late.ids.data(), late.splits.data(), late.records,
                                             hot_.is_on() ? &moves : nullptr, nullptr, call.stream),
                     late);
  }
  NextBatch seen = std::exchange(seen_, NextBatch());
  if (!done.ok()) return done;
  for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].hits += seen.hot.splits[s + 1] - seen.hot.splits[s];
  waiting_ = hot_.is_on() ? std::move(plan.returning) : std::move(active_.keys);
  hot_.Commit(plan);
  active_ = {std::move(seen.told.keys), {}};
  for (const int64_t v : seen.told.received) active_.handles.push_back(found[numbers[v]]);
  LoseSums();
  is_trained_ = false;
  FusedrecDeviceTable* const active = fusedrec_buffer_active(buffer_);
  fusedrec_table_set_clock(active, clock, version);
  FusedrecMessage compared = ViewOf(message);
  compared.fingerprint = seen.fingerprint;
  const int answer = fusedrec_table_lookup(active, &compared, static_cast<int64_t>(rows.storage), rows.data, rows.size,
                                           inverse, handles, num_rows, call.stream);
  // The host cannot compare ids on the device without a wait, so it learns of them from the device's lookup.
  if (answer == kDeviceAbsent) {
    return OtherMessage("No row has another value, but the ids of the look-ahead count as looked up.");
  }
  clock_ = clock + 1;
  trainable_ = answer == 0;
  return StatusOf(answer);
}

absl::Status HostRowsTable::Read(const TableCall& call, const Message& message, const Ahead*, bool peeks,
                                 const RowsOut& rows) {
  NextBatch seen;
  absl::Status done = Receive(call, message, &seen);
  if (done.ok()) done = TakeBack(call);
  if (!done.ok()) return done;
  const int64_t bytes = rows.size * spec().dim * BytesOf(rows.storage);
  std::vector<char> found(bytes);  // zeros after the rows
  done = HostTable::Read(call, seen.message(), nullptr, peeks, {{found.data(), rows.storage}, rows.size});
  if (!done.ok()) return done;
  return StatusOf(fusedrec_copy_to_device(rows.data, found.data(), bytes, call.stream));
}

absl::Status HostRowsTable::Apply(const TableCall& call, const Gradients& in, const Step& step,
                                  std::vector<int32_t>* left_out) {
  if (!IsTrainable()) return StatusOf(kDeviceStale);
  fusedrec_buffer_set_version(buffer_, table_->version());
  const auto update = [&](int32_t* places, int64_t* count) {
    const absl::Status done = StatusOf(fusedrec_table_apply(
        fusedrec_buffer_active(buffer_), in.handles.data(), in.handles.size(), in.inverse.data(), in.inverse.size(), in.grads,
        static_cast<int64_t>(in.storage), in.scale, &step, places, count, call.stream));
    if (!done.ok()) return done;
    table_->BeginUpdate(in.handles.empty() ? 0 : clock_);
    is_trained_ = true;
    return done;
  };
  return LeaveOut(call, spec(), in.handles.size(), update, left_out);
}

absl::Status HostRowsTable::Accumulate(const TableCall& call, const Gradients& in, bool begin,
                                       std::vector<int32_t>* left_out) {
  if (!IsTrainable() || (sums_are_lost_ && !begin)) return StatusOf(kDeviceStale);
  const auto update = [&](int32_t* places, int64_t* count) {
    const absl::Status done = StatusOf(fusedrec_table_accumulate(
        fusedrec_buffer_active(buffer_), in.handles.data(), in.handles.size(), in.inverse.data(), in.inverse.size(), in.grads,
        static_cast<int64_t>(in.storage), in.scale, begin, places, count, call.stream));
    if (!done.ok()) return done;
    has_sums_ = (has_sums_ && !begin) || !in.handles.empty();
    sums_are_lost_ = false;
    return done;
  };
  return LeaveOut(call, spec(), in.handles.size(), update, left_out);
}

absl::Status HostRowsTable::ApplyAccumulated(const TableCall& call, const Step& step) {
  if (!IsTrainable() || sums_are_lost_) return StatusOf(kDeviceStale);
  fusedrec_buffer_set_version(buffer_, table_->version());
  const absl::Status done =
      StatusOf(fusedrec_table_apply_accumulated(fusedrec_buffer_active(buffer_), &step, call.stream));
  if (!done.ok()) return done;
  table_->BeginUpdate(has_sums_ ? clock_ : 0);
  is_trained_ = is_trained_ || has_sums_;
  has_sums_ = false;
  return done;
}

absl::Status HostRowsTable::Statistics(TableStatistics* statistics) {
  for (const Traffic& rows : traffic_) {
    statistics->traffic.insert(statistics->traffic.end(),
                               {rows.hits, rows.sent * record_bytes(), rows.returned * record_bytes()});
  }
  return HostTable::Statistics(statistics);
}

void HostRowsTable::LoseSums() {
  sums_are_lost_ = sums_are_lost_ || has_sums_;
  has_sums_ = trainable_ = false;
}

absl::Status HostRowsTable::TakeBack(const TableCall& call) {
  absl::Status done = WriteBack(call);
  // As many hot rows at a time as a batch has, because the device has memory for these.
  if (done.ok()) done = TakeHotBack(std::max<size_t>(active_.keys.size(), 32), call);
  return done.ok() ? TakeActiveBack(call) : done;
}

absl::Status HostRowsTable::DropBatches(const TableCall& call) {
  const absl::Status done = StatusOf(fusedrec_buffer_drop(buffer_, call.stream));
  if (!done.ok()) return done;
  seen_ = NextBatch();
  active_ = BatchRows();
  LoseSums();
  return done;
}

absl::Status HostRowsTable::DropLeft(const TableCall& call) {
  if (active_.keys.empty() || !table_->IsStale(clock_)) return absl::OkStatus();
  absl::Status done = WriteBack(call);
  if (done.ok()) done = TakeActiveBack(call);
  return done.ok() ? DropBatches(call) : done;
}

absl::Status HostRowsTable::MakeRoom(std::initializer_list<Parcel*> parcels) const {
  const int64_t size = record_bytes();
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

void HostRowsTable::Pack(const ParallelFor& parallel_for, Parcel* parcel) const {
  const RowRecords& records = table_->records();
  const absl::Span<const int64_t> handles = parcel->handles;
  const int64_t rows = handles.size(), size = records.bytes();
  const int64_t of_shard = std::max(kShardBytes / size, kLeastRows), shards = (rows + of_shard - 1) / of_shard;
  parallel_for(shards, of_shard * (100 + size), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * of_shard, last = std::min(end * of_shard, rows);
    records.Read(handles.subspan(first, last - first), SerialFor, parcel->records + first * size);
  });
}

absl::Status HostRowsTable::CountSent(int answer, const Parcel& parcel) {
  if (answer == 0) {
    for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].sent += parcel.splits[s + 1] - parcel.splits[s];
  }
  return StatusOf(answer);
}

template <typename Reader>
absl::Status HostRowsTable::Write(const std::vector<SegmentId>& rows, const Reader& read, const TableCall& call) {
  const char* records = nullptr;
  const absl::Status done = StatusOf(read(&records));
  if (!done.ok()) return done;
  table_->records().WriteTrained(rows, records, call.parallel_for);
  for (const SegmentId& row : rows) ++traffic_[row.segment].returned;
  return done;
}

absl::Status HostRowsTable::WriteBack(const TableCall& call) {
  if (waiting_.empty()) return absl::OkStatus();
  const auto read = [this](const char** records) { return fusedrec_buffer_write_back(buffer_, records); };
  const absl::Status done = Write(waiting_, read, call);
  if (done.ok()) waiting_.clear();
  return done;
}

absl::Status HostRowsTable::TakeActiveBack(const TableCall& call) {
  if (!is_trained_) return absl::OkStatus();
  const auto read = [&](const char** records) { return fusedrec_buffer_read_active(buffer_, records, call.stream); };
  const absl::Status done = Write(active_.keys, read, call);
  if (done.ok()) is_trained_ = false;
  return done;
}

absl::Status HostRowsTable::TakeHotBack(size_t most, const TableCall& call) {
  const std::vector<int64_t> newer = hot_.Newer();
  for (size_t begin = 0, end; begin < newer.size(); begin = end) {
    end = std::min(begin + most, newer.size());
    const int64_t* const slots = newer.data() + begin;
    std::vector<SegmentId> keys;
    for (size_t i = begin; i < end; ++i) keys.push_back(hot_.key(newer[i]));
    const char* written = nullptr;
    const auto read = [&](const char** records) {
      const int answer = fusedrec_buffer_read_hot(buffer_, slots, keys.size(), records, call.stream);
      written = *records;
      return answer;
    };
    const absl::Status done = Write(keys, read, call);
    if (!done.ok()) return done;
    for (size_t i = 0; i < keys.size(); ++i) {
      hot_.NoteWritten(slots[i], RowRecords::UpdatedOf(written + i * record_bytes()));
    }
  }
  return absl::OkStatus();
}

}  // namespace fusedrec
