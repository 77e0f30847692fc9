#include "hash_table/cuda/kernels/host_rows.h"

#include <algorithm>
#include <utility>

#include "common/cuda_api.h"
#include "hash_table/cuda/kernels/device_form.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

constexpr char kOtherMessage[] =
    "message must be that of the look-ahead, got another one. No row was changed. Take a look-ahead and its lookup from "
    "one message.";

// A set of handles.
class HandleSet {
 public:
  explicit HandleSet(int64_t most) {
    while ((int64_t{1} << bits_) < 2 * most) ++bits_;
    slots_.assign(size_t{1} << bits_, kNobody);
  }
  // Returns whether the handle is new.
  bool Insert(int64_t handle) {
    const uint32_t wanted = static_cast<uint32_t>(handle), mask = static_cast<uint32_t>(slots_.size() - 1);
    for (uint32_t i = wanted * 0x9e3779b1u >> (32 - bits_);; i = (i + 1) & mask) {
      if (slots_[i] == wanted) return false;
      if (slots_[i] != kNobody) continue;
      slots_[i] = wanted;
      return true;
    }
  }

 private:
  static constexpr uint32_t kNobody = 0xffffffff;
  int bits_ = 1;
  std::vector<uint32_t> slots_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HostRows>> HostRows::Make(const TableSpec& spec, Optimizer optimizer,
                                                         const FusedrecAllocator& allocator, void* stream) {
  FusedrecTableSpec of = DeviceSpecOf(spec, optimizer);
  // Host memory decides which rows exist, and knows the rows that left.
  const std::vector<Limits> none(of.segments);
  of.limits = none.data();
  of.options.record_tombstones = false;
  auto table = HashTable::Make(spec, std::move(optimizer));
  if (!table.ok()) return table.status();
  FusedrecDeviceBuffer* buffer;
  const int answer = fusedrec_buffer_create(&of, &allocator, spec.hot_rows, &buffer, stream);
  if (answer != 0) return DeviceTableStatus(answer, spec, spec.hot_rows > 0 ? "its hot_rows" : "its segments");
  return std::unique_ptr<HostRows>(new HostRows(*std::move(table), buffer));
}

absl::Status HostRows::StatusOf(int answer) const { return DeviceTableStatus(answer, table_->spec(), "rows of a batch"); }

absl::Status HostRows::Receive(const Call& call, Seen* seen) const {
  const int32_t* const splits = call.message.received_splits;
  seen->splits.assign(splits, splits + call.message.ranks);
  seen->entries.resize(call.num_entries);
  const absl::Status copied = StatusOf(fusedrec_copy_to_host(seen->entries.data(), call.message.entries,
                                                             call.num_entries * sizeof(int64_t), call.stream));
  if (!copied.ok()) return copied;
  const absl::Status sound = CheckMessage(seen->entries, seen->splits, table_->segments());
  if (!sound.ok()) return sound;
  seen->handles.assign(call.num_entries - call.message.ranks * table_->segments(), kNoRow);
  return absl::OkStatus();
}

void HostRows::Tell(const SegmentId& key, int64_t received) {
  seen_.told.push_back(key);
  seen_.told_ids.push_back(received);
}

template <typename RowWanted>
absl::Status HostRows::Pack(const ParallelFor& parallel_for, const RowWanted& row_wanted, Parcel* parcel, Hot* hot) {
  parcel->splits.assign(1, 0);
  if (hot != nullptr) hot->splits.assign(1, 0);
  for (int64_t s = 0; s < table_->segments(); ++s) {
    for (int64_t i = seen_.segment_splits[s]; i < seen_.segment_splits[s + 1]; ++i) {
      const int64_t received = seen_.order[i], handle = row_wanted(received);
      if (handle == kNoRow) continue;
      const SegmentId key{s, seen_.ids[i]};
      const int64_t slot = hot == nullptr ? kNoRow : hot_.Find(key, table_->HeaderOf(handle));
      if (slot != kNoRow) {
        hot->ids.push_back(key.id);
        hot->slots.push_back(slot);
        hot->received.push_back(received);
        continue;
      }
      parcel->ids.push_back(key.id);
      parcel->handles.push_back(handle);
      if (seen_.handles[received] == kNoRow || seen_.look_ahead == 0) Tell(key, received);
    }
    parcel->splits.push_back(parcel->ids.size());
    if (hot != nullptr) hot->splits.push_back(hot->ids.size());
  }
  const absl::Status room = StatusOf(
      fusedrec_buffer_host_memory(buffer_, parcel->handles.size() * table_->records().bytes(), &parcel->records));
  if (room.ok()) table_->records().Read(parcel->handles, parallel_for, parcel->records);
  return room;
}

absl::Status HostRows::ReadAhead(const Call& call) {
  seen_ = Seen();
  Seen seen;
  absl::Status done = Receive(call, &seen);
  if (!done.ok()) return done;
  const int64_t num_ids = seen.handles.size();
  table_->LookAhead(seen.message(), call.parallel_for, {}, absl::MakeSpan(seen.handles), &seen.version, &seen.moves);
  std::vector<int32_t> position(num_ids), id_splits(seen.splits.size());
  seen.ids.resize(num_ids);
  seen.order.resize(num_ids);
  seen.segment_splits.resize(table_->segments() + 1);
  UnpackMessage(seen.entries, seen.splits, absl::MakeSpan(seen.ids), absl::MakeSpan(seen.segment_splits),
                absl::MakeSpan(position), absl::MakeSpan(id_splits));
  for (int64_t v = 0; v < num_ids; ++v) seen.order[position[v]] = v;
  seen_ = std::move(seen);

  HandleSet met(num_ids);
  Parcel parcel;
  Hot hot;
  const auto first_of_row = [&](int64_t v) {
    const int64_t handle = seen_.handles[v];
    return handle != kNoRow && met.Insert(handle) ? handle : kNoRow;
  };
  done = Pack(call.parallel_for, first_of_row, &parcel, &hot);
  if (!done.ok()) return done;
  for (int64_t s = 0; s < table_->segments(); ++s) {
    for (int64_t i = hot.splits[s]; i < hot.splits[s + 1]; ++i) Tell({s, hot.ids[i]}, hot.received[i]);
  }
  const FusedrecHotRows in_pool{hot.ids.data(), hot.splits.data(), hot.slots.data()};
  done = StatusOf(fusedrec_buffer_prefetch(buffer_, parcel.ids.data(), parcel.splits.data(), parcel.records, &in_pool,
                                           call.stream));
  if (!done.ok()) return done;
  CountSent(parcel);
  seen_.hot_splits = std::move(hot.splits);
  seen_.look_ahead = ++look_aheads_;
  return done;
}

absl::Status HostRows::LookAhead(const Call& call, int64_t* look_ahead) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status done = WriteBack(call.parallel_for);
  if (done.ok()) done = ReadAhead(call);
  *look_ahead = seen_.look_ahead;
  return done;
}

absl::Status HostRows::Lookup(const Call& call, int64_t look_ahead, int64_t storage, void* rows, int64_t out_rows,
                              int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status done = WriteBack(call.parallel_for);
  if (done.ok() && (look_ahead == 0 || look_ahead != seen_.look_ahead)) done = ReadAhead(call);
  if (!done.ok()) return done;
  if (static_cast<int64_t>(seen_.entries.size()) != call.num_entries) return absl::InvalidArgumentError(kOtherMessage);

  // The rows of the batch that ends are all there: nothing has left since their lookup.
  HotRows::Plan plan;
  if (hot_.is_on()) done = hot_.PlanEnd(active_, is_trained_, *table_, &plan);
  if (!done.ok()) return done;

  const Message message = seen_.message();
  const Ahead ahead{seen_.handles, seen_.version, seen_.moves};
  const uint32_t clock = table_->clock(), version = table_->version();
  std::vector<int32_t> numbers(message.num_ids);
  std::vector<int64_t> found;
  done = table_->Lookup(message, call.parallel_for, {}, absl::MakeSpan(numbers), &found, nullptr, &ahead);

  Parcel late;
  std::vector<bool> met(found.size());
  const auto first_of_changed = [&](int64_t v) {
    const int32_t number = numbers[v];
    if (met[number]) return kNoRow;
    met[number] = true;
    return table_->HeaderOf(found[number]).updated > seen_.version ? found[number] : kNoRow;
  };
  if (done.ok()) done = Pack(call.parallel_for, first_of_changed, &late, nullptr);
  if (done.ok()) {
    const FusedrecPoolMoves moves = plan.Moves();
    done = StatusOf(fusedrec_buffer_advance(buffer_, late.ids.data(), late.splits.data(), late.records,
                                            hot_.is_on() ? &moves : nullptr, nullptr, call.stream));
  }
  Seen seen = std::exchange(seen_, Seen());
  if (!done.ok()) return done;
  CountSent(late);
  for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].hits += seen.hot_splits[s + 1] - seen.hot_splits[s];
  waiting_ = hot_.is_on() ? std::move(plan.returning) : std::move(active_.keys);
  hot_.Commit(plan);
  active_ = {std::move(seen.told), {}};
  for (const int64_t v : seen.told_ids) active_.handles.push_back(found[numbers[v]]);
  LoseSums();
  is_trained_ = false;
  FusedrecDeviceTable* const active = fusedrec_buffer_active(buffer_);
  fusedrec_table_set_clock(active, clock, version);
  const int answer = fusedrec_table_lookup(active, &call.message, storage, rows, out_rows, inverse, handles, num_rows,
                                           call.stream);
  if (answer == kDeviceAbsent) return absl::InvalidArgumentError(kOtherMessage);
  clock_ = clock + 1;
  trainable_ = answer == 0;
  return StatusOf(answer);
}

absl::Status HostRows::Find(const Call& call, Storage storage, void* rows, bool peeks) {
  std::lock_guard<std::mutex> lock(mutex_);
  Seen seen;
  absl::Status done = Receive(call, &seen);
  if (done.ok()) done = TakeBack(call.parallel_for, call.stream);
  if (!done.ok()) return done;
  if (peeks) {
    table_->Peek(seen.message(), call.parallel_for, {rows, storage});
  } else {
    table_->Find(seen.message(), call.parallel_for, {rows, storage});
  }
  return done;
}

absl::Status HostRows::Prefetch(const Call& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  Seen seen;
  const absl::Status done = Receive(call, &seen);
  if (done.ok()) table_->Prefetch(seen.message());
  return done;
}

absl::Status HostRows::Apply(const DeviceGradients& in, const StepInput& step, int32_t* left_out,
                             int64_t* num_left_out, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!trainable_) return StatusOf(kDeviceStale);
  const absl::Status done = StatusOf(fusedrec_table_apply(fusedrec_buffer_active(buffer_), in.handles, in.num_rows,
                                                          in.inverse, in.num_ids, in.grads, in.storage, in.scale, &step,
                                                          left_out, num_left_out, stream));
  if (!done.ok()) return done;
  table_->BeginUpdate(in.num_rows > 0 ? clock_ : 0);
  is_trained_ = true;
  return done;
}

absl::Status HostRows::Accumulate(const DeviceGradients& in, bool begin, int32_t* left_out, int64_t* num_left_out,
                                  void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!trainable_ || (sums_are_lost_ && !begin)) return StatusOf(kDeviceStale);
  const absl::Status done = StatusOf(fusedrec_table_accumulate(
      fusedrec_buffer_active(buffer_), in.handles, in.num_rows, in.inverse, in.num_ids, in.grads, in.storage, in.scale,
      begin, left_out, num_left_out, stream));
  if (!done.ok()) return done;
  has_sums_ = (has_sums_ && !begin) || in.num_rows > 0;
  sums_are_lost_ = false;
  return done;
}

absl::Status HostRows::ApplyAccumulated(const StepInput& step, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!trainable_ || sums_are_lost_) return StatusOf(kDeviceStale);
  const absl::Status done = StatusOf(fusedrec_table_apply_accumulated(fusedrec_buffer_active(buffer_), &step, stream));
  if (!done.ok()) return done;
  table_->BeginUpdate(has_sums_ ? clock_ : 0);
  is_trained_ = is_trained_ || has_sums_;
  has_sums_ = false;
  return done;
}

void HostRows::LoseSums() {
  sums_are_lost_ = sums_are_lost_ || has_sums_;
  has_sums_ = trainable_ = false;
}

template <typename Read>
absl::Status HostRows::WriteTrained(const std::vector<SegmentId>& rows, const Read& read,
                                    const ParallelFor& parallel_for) {
  char* records;
  int answer = fusedrec_buffer_host_memory(buffer_, rows.size() * table_->records().bytes(), &records);
  if (answer == 0) answer = read(records);
  if (answer != 0) return StatusOf(answer);
  table_->records().WriteTrained(rows, records, parallel_for);
  for (const SegmentId& row : rows) ++traffic_[row.segment].returned;
  return absl::OkStatus();
}

absl::Status HostRows::WriteBack(const ParallelFor& parallel_for) {
  if (waiting_.empty()) return absl::OkStatus();
  const auto read = [this](char* records) { return fusedrec_buffer_write_back(buffer_, records); };
  const absl::Status done = WriteTrained(waiting_, read, parallel_for);
  if (done.ok()) waiting_.clear();
  return done;
}

// As many rows at a time as a batch has, because the device has memory for these.
absl::Status HostRows::TakeHotBack(const ParallelFor& parallel_for, void* stream) {
  const std::vector<int64_t> newer = hot_.Newer();
  const size_t most = std::max<size_t>(active_.keys.size(), 32);
  for (size_t begin = 0, end; begin < newer.size(); begin = end) {
    end = std::min(begin + most, newer.size());
    const int64_t* const slots = newer.data() + begin;
    std::vector<SegmentId> keys;
    for (size_t i = begin; i < end; ++i) keys.push_back(hot_.key(newer[i]));
    const char* written = nullptr;
    const auto read = [&](char* records) {
      written = records;
      return fusedrec_buffer_read_hot(buffer_, slots, keys.size(), records, stream);
    };
    const absl::Status done = WriteTrained(keys, read, parallel_for);
    if (!done.ok()) return done;
    for (size_t i = 0; i < keys.size(); ++i) {
      hot_.NoteWritten(slots[i], RowRecords::UpdatedOf(written + i * table_->records().bytes()));
    }
  }
  return absl::OkStatus();
}

// Brings all rows in host memory up to date.
absl::Status HostRows::TakeBack(const ParallelFor& parallel_for, void* stream) {
  absl::Status done = WriteBack(parallel_for);
  if (done.ok()) done = TakeHotBack(parallel_for, stream);
  if (!done.ok() || !is_trained_) return done;
  const auto read = [=](char* records) { return fusedrec_buffer_read_active(buffer_, records, stream); };
  done = WriteTrained(active_.keys, read, parallel_for);
  if (done.ok()) is_trained_ = false;
  return done;
}

absl::Status HostRows::OnHost(Access access, const ParallelFor& parallel_for, void* stream,
                              const std::function<absl::Status(HashTable*)>& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (access != Access::kNumbers) {
    const absl::Status done = TakeBack(parallel_for, stream);
    if (!done.ok()) return done;
  }
  if (access == Access::kChange) {
    const absl::Status done = StatusOf(fusedrec_buffer_drop(buffer_, stream));
    if (!done.ok()) return done;
    seen_ = Seen();
    active_ = BatchRows();
    hot_.Clear();
    LoseSums();
  }
  return use(table_.get());
}

void HostRows::CountSent(const Parcel& parcel) {
  for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].sent += parcel.splits[s + 1] - parcel.splits[s];
}

std::vector<int64_t> HostRows::Traffic() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t bytes = table_->records().bytes();
  std::vector<int64_t> traffic;
  for (const RowTraffic& rows : traffic_) {
    traffic.insert(traffic.end(), {rows.hits, rows.sent * bytes, rows.returned * bytes});
  }
  return traffic;
}

}  // namespace fusedrec
