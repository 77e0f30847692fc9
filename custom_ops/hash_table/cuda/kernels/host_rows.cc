#include "hash_table/cuda/kernels/host_rows.h"

#include <algorithm>
#include <utility>

#include "common/cuda_api.h"
#include "hash_table/cuda/kernels/device_form.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

// counted: what has happened by then.
absl::Status OtherMessage(const char* counted) {
  return absl::InvalidArgumentError(absl::StrCat("message must be that of the look-ahead, got another one. ", counted,
                                                 " Take a look-ahead and its lookup from one message."));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostRows>> HostRows::Make(const TableSpec& spec,
                                                         const FusedrecAllocator& allocator, void* stream) {
  const DeviceTexts texts(spec);
  auto table = HashTable::Make(spec);
  if (!table.ok()) return table.status();
  FusedrecDeviceBuffer* buffer;
  const int answer = fusedrec_buffer_create(&texts, &allocator, &buffer, stream);
  if (answer != 0) return DeviceTableStatus(answer, spec, spec.hot_rows > 0 ? "its hot_rows" : "its segments");
  return std::unique_ptr<HostRows>(new HostRows(*std::move(table), buffer));
}

absl::Status HostRows::Receive(const Call& call, NextBatch* seen) const {
  const int32_t* const splits = call.message.received_splits;
  seen->splits.assign(splits, splits + call.message.ranks);
  seen->entries.resize(call.num_entries);
  const int64_t* const entries = call.message.entries;
  if (call.entries_on_host) {
    std::copy(entries, entries + call.num_entries, seen->entries.begin());
  } else {
    const absl::Status copied = StatusOf(fusedrec_copy_to_host(seen->entries.data(), entries,
                                                               call.num_entries * sizeof(int64_t), call.stream));
    if (!copied.ok()) return copied;
  }
  const absl::Status sound = CheckMessage(seen->entries, seen->splits, table_->segments());
  if (!sound.ok()) return sound;
  seen->handles.assign(call.num_entries - call.message.ranks * table_->segments(), kNoRow);
  return absl::OkStatus();
}

absl::Status HostRows::ReadAhead(const Call& call) {
  seen_ = NextBatch();
  NextBatch seen;
  absl::Status done = Receive(call, &seen);
  if (!done.ok()) return done;
  table_->LookAhead(seen.message(), call.parallel_for, {}, absl::MakeSpan(seen.handles), &seen.version, &seen.moves);
  seen.fingerprint = FingerprintOf(seen.message(), table_->segments(), call.parallel_for);
  seen.GroupBySegment(table_->segments());
  seen_ = std::move(seen);

  RowTransfers::Parcel parcel, more;
  seen_.ChooseAhead(*table_, hot_, waiting_, &parcel, &more);
  done = transfers_.MakeRoom({&parcel, &more});
  if (!done.ok()) return done;
  // These rows go to the device while the waiting rows come back.
  transfers_.Pack(call.parallel_for, &parcel);
  done = transfers_.Prefetch(parcel, seen_.hot.view(), call.stream);
  if (done.ok()) done = WriteBack(call.parallel_for);
  if (!done.ok()) return done;
  transfers_.Pack(call.parallel_for, &more);
  done = transfers_.PrefetchMore(more, call.stream);
  if (done.ok()) seen_.look_ahead = ++look_aheads_;
  return done;
}

absl::Status HostRows::LookAhead(const Call& call, int64_t* look_ahead) {
  std::lock_guard<std::mutex> lock(mutex_);
  const absl::Status done = ReadAhead(call);
  *look_ahead = seen_.look_ahead;
  return done;
}

absl::Status HostRows::Lookup(const Call& call, int64_t look_ahead, int64_t storage, void* rows, int64_t out_rows,
                              int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status done = DropLeft(call.parallel_for, call.stream);
  if (done.ok() && (look_ahead == 0 || look_ahead != seen_.look_ahead)) done = ReadAhead(call);
  if (!done.ok()) return done;
  if (static_cast<int64_t>(seen_.entries.size()) != call.num_entries) return OtherMessage("The table is what it was.");

  // The rows of the batch that ends are all there.
  HotRows::Plan plan;
  if (hot_.is_on()) done = hot_.PlanEnd(active_, is_trained_, *table_, &plan);
  if (!done.ok()) return done;

  const Message message = seen_.message();
  const Ahead ahead = seen_.ahead();
  const uint32_t clock = table_->clock(), version = table_->version();
  std::vector<int32_t> numbers(message.num_ids);
  std::vector<int64_t> found;
  done = table_->Lookup(message, call.parallel_for, {}, absl::MakeSpan(numbers), &found, nullptr, &ahead);
  RowTransfers::Parcel late;
  if (done.ok()) {
    seen_.ChooseLate(*table_, call.parallel_for, numbers, found, &late);
    done = transfers_.MakeRoom({&late});
  }
  if (done.ok()) {
    transfers_.Pack(call.parallel_for, &late);
    const FusedrecPoolMoves moves = plan.Moves();
    done = transfers_.Advance(late, hot_.is_on() ? &moves : nullptr, call.stream);
  }
  NextBatch seen = std::exchange(seen_, NextBatch());
  if (!done.ok()) return done;
  transfers_.CountHits(seen.hot.splits);
  waiting_ = hot_.is_on() ? std::move(plan.returning) : std::move(active_.keys);
  hot_.Commit(plan);
  active_ = {std::move(seen.told.keys), {}};
  for (const int64_t v : seen.told.received) active_.handles.push_back(found[numbers[v]]);
  LoseSums();
  is_trained_ = false;
  FusedrecDeviceTable* const active = fusedrec_buffer_active(buffer_);
  fusedrec_table_set_clock(active, clock, version);
  FusedrecMessage compared = call.message;
  compared.fingerprint = seen.fingerprint;
  const int answer = fusedrec_table_lookup(active, &compared, storage, rows, out_rows, inverse, handles, num_rows,
                                           call.stream);
  // The host cannot compare ids on the device without a wait, so it learns of them from the device's lookup.
  if (answer == kDeviceAbsent) {
    return OtherMessage("No row has another value, but the ids of the look-ahead count as looked up.");
  }
  clock_ = clock + 1;
  trainable_ = answer == 0;
  return StatusOf(answer);
}

absl::Status HostRows::Find(const Call& call, Storage storage, void* rows, bool peeks) {
  std::lock_guard<std::mutex> lock(mutex_);
  NextBatch seen;
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
  NextBatch seen;
  const absl::Status done = Receive(call, &seen);
  if (done.ok()) table_->Prefetch(seen.message());
  return done;
}

absl::Status HostRows::Apply(const DeviceGradients& in, const Step& step, int32_t* left_out,
                             int64_t* num_left_out, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!IsTrainable()) return StatusOf(kDeviceStale);
  fusedrec_buffer_set_version(buffer_, table_->version());
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
  if (!IsTrainable() || (sums_are_lost_ && !begin)) return StatusOf(kDeviceStale);
  const absl::Status done = StatusOf(fusedrec_table_accumulate(
      fusedrec_buffer_active(buffer_), in.handles, in.num_rows, in.inverse, in.num_ids, in.grads, in.storage, in.scale,
      begin, left_out, num_left_out, stream));
  if (!done.ok()) return done;
  has_sums_ = (has_sums_ && !begin) || in.num_rows > 0;
  sums_are_lost_ = false;
  return done;
}

absl::Status HostRows::ApplyAccumulated(const Step& step, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!IsTrainable() || sums_are_lost_) return StatusOf(kDeviceStale);
  fusedrec_buffer_set_version(buffer_, table_->version());
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

absl::Status HostRows::WriteBack(const ParallelFor& parallel_for) {
  if (waiting_.empty()) return absl::OkStatus();
  const absl::Status done = transfers_.WriteBack(waiting_, parallel_for);
  if (done.ok()) waiting_.clear();
  return done;
}

absl::Status HostRows::TakeActiveBack(const ParallelFor& parallel_for, void* stream) {
  if (!is_trained_) return absl::OkStatus();
  const absl::Status done = transfers_.TakeActiveBack(active_.keys, parallel_for, stream);
  if (done.ok()) is_trained_ = false;
  return done;
}

absl::Status HostRows::TakeBack(const ParallelFor& parallel_for, void* stream) {
  absl::Status done = WriteBack(parallel_for);
  // As many hot rows at a time as a batch has, because the device has memory for these.
  const size_t most = std::max<size_t>(active_.keys.size(), 32);
  if (done.ok()) done = transfers_.TakeHotBack(&hot_, most, parallel_for, stream);
  return done.ok() ? TakeActiveBack(parallel_for, stream) : done;
}

absl::Status HostRows::DropBatches(void* stream) {
  const absl::Status done = StatusOf(fusedrec_buffer_drop(buffer_, stream));
  if (!done.ok()) return done;
  seen_ = NextBatch();
  active_ = BatchRows();
  LoseSums();
  return done;
}

absl::Status HostRows::DropLeft(const ParallelFor& parallel_for, void* stream) {
  if (active_.keys.empty() || !table_->IsStale(clock_)) return absl::OkStatus();
  absl::Status done = WriteBack(parallel_for);
  if (done.ok()) done = TakeActiveBack(parallel_for, stream);
  return done.ok() ? DropBatches(stream) : done;
}

absl::Status HostRows::OnHost(Access access, const ParallelFor& parallel_for, void* stream,
                              const std::function<absl::Status(HashTable*)>& use) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (access != Access::kNumbers) {
    const absl::Status done = TakeBack(parallel_for, stream);
    if (!done.ok()) return done;
  }
  if (access == Access::kChange) {
    const absl::Status done = DropBatches(stream);
    if (!done.ok()) return done;
    hot_.Clear();
  }
  return use(table_.get());
}

std::vector<int64_t> HostRows::Traffic() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return transfers_.Traffic();
}

}  // namespace fusedrec
