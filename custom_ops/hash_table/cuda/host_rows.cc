// A table on a GPU that is larger than the device: rows are in host memory, the rows of two batches on the device, and hot
// rows, which stay there.
//
// A HashTable in host memory decides which rows exist, are new and leave. It has the counts, clocks, options and
// checkpoints. The device trains the rows, in the two buffers of NestPipe, section IV-B (buffer_cuda.h). HostRowsTable
// moves rows between the two.
//   look-ahead of t + 1   The ids of t + 1 are in host memory. The host finds their rows and copies them to the device, but
//                         for hot rows. Meanwhile the rows of batch t - 1 come back; rows of both batches follow behind them.
//                         The tables do not change.
//   lookup of t + 1       The host counts, inserts and evicts. It sends late rows to the device: rows that are new or were
//                         changed elsewhere since the look-ahead. The buffers change roles, rows of batch t begin to
//                         come back, and the device looks up. Rows of batch t that are hot go to their slots.
//   update of t + 1       The device updates alone. The host only counts the version.
//
// The result equals a HashTable bit for bit; clock and version on the device are the host's. A lookup without a look-ahead
// first runs one itself, at full cost. There is one look-ahead at a time: the lookup of an earlier one begins anew.
//
// # Hot rows
// With hot_rows, rows of the pool (hot_rows.h) go back to host memory when others take their slots, or when a call reads or
// changes rows in host memory: evaluation, saves, evictions by hand. Calls that change rows also empty the pool.
//
// # Rows that leave while they are on the device
// The window is one lookup, so the lookup of t + 1 may evict a row of batch t, but no lookup before. The record of such a
// row comes back and is skipped. An id never leaves and returns inside one lookup, so no row that the device refreshes for
// t + 1 belongs to an earlier id.
//
// A lookup may fail for want of device memory after it has evicted rows of batch t. Batch t is then stale in host memory.
// Its gradients are refused, as in any table. The lookup after that first takes back the rows that are left and drops the
// batch on the device. It would else refresh the new row of an id from the old one.
//
// Every other change of rows in host memory (imports, removals by hand) takes back the rows on the device and drops them
// there. Later gradients of these rows are refused, too.
#include <initializer_list>

#include "common/cuda_api.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/buffer/buffer_cuda.h"
#include "hash_table/cuda/device_table.h"
#include "hash_table/cuda/hot_rows.h"
#include "rank_partition/rank_partition.h"

namespace fusedrec {
namespace {

// What one thread copies at a time: so many bytes of records, but at least so many rows, because rows lie anywhere in
// memory. Less is not worth waking a thread.
constexpr int64_t kShardBytes = int64_t{1} << 16, kLeastRows = 128;

absl::Status OtherMessage(const char* counted) {
  return Invalid("message must be that of the look-ahead, got another one. ", counted,
      " Take a look-ahead and its lookup from one message.");
}

class HostRowsTable : public HashTable {
 public:
  explicit HostRowsTable(const TableSpec& spec)
      : HashTable(spec), hot_(spec.hot_rows, segments()), traffic_(segments()) {}
  ~HostRowsTable() override { fusedrec_buffer_destroy(buffer_); }

  absl::Status Open(const FusedrecAllocator& allocator, void* stream) {
    const DeviceTexts texts(spec());
    FUSEDREC_TRY(HashTable::Open());
    return DeviceTableStatus(fusedrec_buffer_create(&texts, &allocator, &buffer_, stream), spec(),
                             spec().hot_rows > 0 ? "its hot_rows_per_rank" : "its segments");
  }

  absl::StatusOr<std::unique_lock<std::mutex>> Begin(const TableCall& call, Access access) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (access != Access::kAsTheyAre) FUSEDREC_TRY(TakeBack(call));
    if (access == Access::kChange) {
      FUSEDREC_TRY(DropBatches(call));
      hot_.Clear();
    }
    return {std::move(lock)};
  }

  // With the message in host memory it waits for no kernel.
  absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut&, absl::Span<int64_t>,
                         Ahead* mark) override {
    NextBatch seen(message);
    std::copy(message.entries.begin(), message.entries.end(), seen.entries.begin());
    const absl::Status done = ReadAhead(call, std::move(seen));
    mark->version = seen_.look_ahead;
    return done;
  }

  absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                      const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) override {
    if (window != 1) {
      return Invalid("window must be 1 on a GPU with host_rows, whose device holds the rows of one lookup, got ", window,
          ". Update before the next lookup, or use a table in host memory: tf.device('/CPU:0').");
    }
    FUSEDREC_TRY(DropLeft(call));
    if (ahead == nullptr || ahead->version == 0 || ahead->version != seen_.look_ahead) {
      NextBatch seen;
      FUSEDREC_TRY(Receive(call, message, &seen));
      FUSEDREC_TRY(ReadAhead(call, std::move(seen)));
    }
    if (seen_.entries.size() != message.entries.size()) return OtherMessage("The table is what it was.");

    HotRows::Plan plan;
    if (hot_.is_on()) FUSEDREC_TRY(hot_.PlanEnd(active_, is_trained_, *this, &plan));

    const Message on_host = seen_.message();
    const Ahead found_ahead = seen_.ahead();
    const uint32_t before = clock(), version_before = version();
    std::vector<int32_t> numbers(on_host.num_ids);
    std::vector<int64_t> found(on_host.num_ids);
    int64_t num_found;
    absl::Status done = LookUp(call, on_host, window, &found_ahead, {}, numbers.data(), found.data(), &num_found);
    Parcel late;
    if (done.ok()) {
      found.resize(num_found);
      seen_.ChooseLate(*this, call.parallel_for, numbers, found, &late);
      done = MakeRoom({&late});
    }
    if (done.ok()) {
      Pack(call.parallel_for, &late);
      const FusedrecPoolMoves moves = plan.Moves();
      done = CountSent(fusedrec_buffer_advance(buffer_, late.ids.data(), late.splits.data(), late.records,
                                               hot_.is_on() ? &moves : nullptr, call.stream),
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
    fusedrec_table_set_clock(active, before, version_before);
    FusedrecMessage compared = ViewOf(message);
    compared.fingerprint = seen.fingerprint;
    const int answer = fusedrec_table_lookup(active, &compared, window, static_cast<int64_t>(rows.storage), rows.data,
                                             rows.size, inverse, handles, num_rows, call.stream);
    // The host cannot compare ids on the device without a wait, so it learns of them from the device's lookup.
    if (answer == kDeviceAbsent) {
      return OtherMessage("No row has another value, but the ids of the look-ahead count as looked up.");
    }
    clock_ = before + 1;
    trainable_ = answer == 0;
    return StatusOf(answer);
  }

  // A look-ahead is of no use here: no row is on the device because of it.
  absl::Status Read(const TableCall& call, const Message& message, int64_t window, const Ahead*,
                    const RowsOut& rows) override {
    NextBatch seen;
    FUSEDREC_TRY(Receive(call, message, &seen));
    FUSEDREC_TRY(TakeBack(call));
    const int64_t bytes = rows.size * spec().dim * BytesOf(rows.storage);
    std::vector<char> found(bytes);  // zeros after the rows
    FUSEDREC_TRY(HashTable::Read(call, seen.message(), window, nullptr, {found.data(), rows.storage, rows.size}));
    return StatusOf(fusedrec_copy_to_device(rows.data, found.data(), bytes, call.stream));
  }

  // Sums are of parts of the last lookup, because its rows alone are on the device.
  absl::Status Apply(const TableCall& call, const Gradients& in, const Step& step,
                     std::vector<int32_t>* left_out) override {
    if (!IsTrainable()) return StatusOf(kDeviceStale);
    fusedrec_buffer_set_version(buffer_, version());
    const auto update = [&, view = ViewOf(in)](int32_t* places, int64_t* count) -> absl::Status {
      FUSEDREC_TRY(
          StatusOf(fusedrec_table_apply(fusedrec_buffer_active(buffer_), &view, &step, places, count, call.stream)));
      BeginUpdate(in.handles.empty() ? 0 : clock_);
      is_trained_ = true;
      return absl::OkStatus();
    };
    return LeaveOut(call, spec(), in.handles.size(), update, left_out);
  }

  absl::Status Accumulate(const TableCall& call, const Gradients& in, bool begin,
                          std::vector<int32_t>* left_out) override {
    if (!IsTrainable() || (sums_are_lost_ && !begin)) return StatusOf(kDeviceStale);
    const auto update = [&, view = ViewOf(in)](int32_t* places, int64_t* count) -> absl::Status {
      FUSEDREC_TRY(StatusOf(
          fusedrec_table_accumulate(fusedrec_buffer_active(buffer_), &view, begin, places, count, call.stream)));
      has_sums_ = (has_sums_ && !begin) || !in.handles.empty();
      sums_are_lost_ = false;
      return absl::OkStatus();
    };
    return LeaveOut(call, spec(), in.handles.size(), update, left_out);
  }

  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override {
    if (!IsTrainable() || sums_are_lost_) return StatusOf(kDeviceStale);
    fusedrec_buffer_set_version(buffer_, version());
    FUSEDREC_TRY(StatusOf(fusedrec_table_apply_accumulated(fusedrec_buffer_active(buffer_), &step, call.stream)));
    BeginUpdate(has_sums_ ? clock_ : 0);
    is_trained_ = is_trained_ || has_sums_;
    has_sums_ = false;
    return absl::OkStatus();
  }

  absl::Status Statistics(TableStatistics* statistics) override {
    for (const Traffic& rows : traffic_) {
      statistics->traffic.insert(statistics->traffic.end(),
                                 {rows.hits, rows.sent * record_bytes(), rows.returned * record_bytes()});
    }
    return HashTable::Statistics(statistics);
  }

  absl::Status ReadNumbers(const TableCall&, absl::Span<const int64_t>, absl::Span<const int64_t>, float*,
                           int64_t) override {
    return RequireAveraged(spec());
  }

 private:
  // Of lookups, by segment: rows in the pool, rows that went to the device, and rows that came back.
  struct Traffic {
    int64_t hits = 0, sent = 0, returned = 0;
  };

  absl::Status StatusOf(int answer) const { return DeviceTableStatus(answer, spec(), "rows of a batch"); }
  // Whether gradients may train the active rows: all of them are still those of their lookup.
  bool IsTrainable() const { return trainable_ && !IsStale(clock_); }

  // Copies the ids of a message on the device to the host, which waits for the stream, and checks them.
  absl::Status Receive(const TableCall& call, const Message& message, NextBatch* seen) const {
    *seen = NextBatch(message);
    FUSEDREC_TRY(StatusOf(fusedrec_copy_to_host(seen->entries.data(), message.entries.data(),
                                                seen->entries.size() * sizeof(int64_t), call.stream)));
    return CheckMessage(seen->entries, seen->splits, segments());
  }

  absl::Status ReadAhead(const TableCall& call, NextBatch seen) {
    seen_ = NextBatch();
    Ahead mark{};
    FUSEDREC_TRY(HashTable::LookAhead(call, seen.message(), {}, absl::MakeSpan(seen.handles), &mark));
    seen.version = mark.version;
    seen.moves = mark.moves;
    seen.fingerprint = mark.fingerprint - number_;
    seen.GroupBySegment(segments());
    seen_ = std::move(seen);

    Parcel parcel, more;
    seen_.ChooseAhead(*this, hot_, waiting_, &parcel, &more);
    FUSEDREC_TRY(MakeRoom({&parcel, &more}));
    // These rows go to the device while the waiting rows come back.
    Pack(call.parallel_for, &parcel);
    const FusedrecHotRows hot = seen_.hot.view();
    FUSEDREC_TRY(CountSent(fusedrec_buffer_prefetch(buffer_, false, parcel.ids.data(), parcel.splits.data(), parcel.records,
                                                    &hot, call.stream),
                           parcel));
    FUSEDREC_TRY(WriteBack(call));
    Pack(call.parallel_for, &more);
    FUSEDREC_TRY(CountSent(fusedrec_buffer_prefetch(buffer_, true, more.ids.data(), more.splits.data(), more.records,
                                                    nullptr, call.stream),
                           more));
    seen_.look_ahead = ++look_aheads_;
    return absl::OkStatus();
  }

  // The active rows leave the device, so no gradient trains them.
  void LoseSums() {
    sums_are_lost_ = sums_are_lost_ || has_sums_;
    has_sums_ = trainable_ = false;
  }

  // Brings all rows in host memory up to date.
  absl::Status TakeBack(const TableCall& call) {
    FUSEDREC_TRY(WriteBack(call));
    // As many hot rows at a time as a batch has, because the device has memory for these.
    FUSEDREC_TRY(TakeHotBack(std::max<size_t>(active_.keys.size(), 32), call));
    return TakeActiveBack(call);
  }

  absl::Status DropBatches(const TableCall& call) {
    FUSEDREC_TRY(StatusOf(fusedrec_buffer_drop(buffer_, call.stream)));
    seen_ = NextBatch();
    active_ = BatchRows();
    LoseSums();
    return absl::OkStatus();
  }

  // Takes the active rows back and drops them, if some of them may have left the table.
  absl::Status DropLeft(const TableCall& call) {
    if (active_.keys.empty() || !IsStale(clock_)) return absl::OkStatus();
    FUSEDREC_TRY(WriteBack(call));
    FUSEDREC_TRY(TakeActiveBack(call));
    return DropBatches(call);
  }

  // Gives parcels memory for their records, until the next call.
  absl::Status MakeRoom(std::initializer_list<Parcel*> parcels) const {
    const int64_t size = record_bytes();
    int64_t bytes = 0;
    for (const Parcel* parcel : parcels) bytes += parcel->handles.size() * size;
    if (bytes == 0) return absl::OkStatus();  // no copies to wait for
    char* memory;
    FUSEDREC_TRY(StatusOf(fusedrec_buffer_host_memory(buffer_, bytes, &memory)));
    for (Parcel* parcel : parcels) {
      parcel->records = memory;
      memory += parcel->handles.size() * size;
    }
    return absl::OkStatus();
  }

  // Copies the records of a parcel's rows, in their present state. Several threads share the rows.
  void Pack(const ParallelFor& parallel_for, Parcel* parcel) {
    const absl::Span<const int64_t> handles = parcel->handles;
    const int64_t rows = handles.size(), size = record_bytes();
    const int64_t of_shard = std::max(kShardBytes / size, kLeastRows), shards = (rows + of_shard - 1) / of_shard;
    parallel_for(shards, of_shard * (100 + size), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * of_shard, last = std::min(end * of_shard, rows);
      records().Read(handles.subspan(first, last - first), SerialFor, parcel->records + first * size);
    });
  }

  absl::Status CountSent(int answer, const Parcel& parcel) {
    if (answer == 0) {
      for (size_t s = 0; s < traffic_.size(); ++s) traffic_[s].sent += parcel.splits[s + 1] - parcel.splits[s];
    }
    return StatusOf(answer);
  }

  // Writes rows, in the order of the device, to host memory that is older; read(&records) gives their records' address.
  template <typename Reader>
  absl::Status Write(const std::vector<SegmentId>& rows, const Reader& read, const TableCall& call) {
    const char* from = nullptr;
    FUSEDREC_TRY(StatusOf(read(&from)));
    records().WriteTrained(rows, from, call.parallel_for);
    for (const SegmentId& row : rows) ++traffic_[row.segment].returned;
    return absl::OkStatus();
  }

  absl::Status WriteBack(const TableCall& call) {
    if (waiting_.empty()) return absl::OkStatus();
    const auto read = [this](const char** records) { return fusedrec_buffer_write_back(buffer_, records); };
    FUSEDREC_TRY(Write(waiting_, read, call));
    waiting_.clear();
    return absl::OkStatus();
  }

  // Rows of the batch under way, which also stay on the device.
  absl::Status TakeActiveBack(const TableCall& call) {
    if (!is_trained_) return absl::OkStatus();
    const auto read = [&](const char** records) { return fusedrec_buffer_read_active(buffer_, records, call.stream); };
    FUSEDREC_TRY(Write(active_.keys, read, call));
    is_trained_ = false;
    return absl::OkStatus();
  }

  absl::Status TakeHotBack(size_t most, const TableCall& call) {
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
      FUSEDREC_TRY(Write(keys, read, call));
      for (size_t i = 0; i < keys.size(); ++i) {
        hot_.NoteWritten(slots[i], RowRecords::UpdatedOf(written + i * record_bytes()));
      }
    }
    return absl::OkStatus();
  }

  FusedrecDeviceBuffer* buffer_ = nullptr;
  std::mutex mutex_;
  HotRows hot_;
  std::vector<Traffic> traffic_;  // by segment
  NextBatch seen_;
  int64_t look_aheads_ = 0;
  BatchRows active_;                // rows of the batch on the device
  std::vector<SegmentId> waiting_;  // rows that wait to go back, in their order there
  uint32_t clock_ = 0;       // of the lookup whose rows are active
  bool trainable_ = false;   // whether they are, as that lookup left them
  bool is_trained_ = false;  // whether they are newer than in host memory
  bool has_sums_ = false;    // whether gradients wait for their update
  bool sums_are_lost_ = false;  // whether rows have left the device since
};

}  // namespace

absl::Status MakeHostRowsTable(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                               std::unique_ptr<Table>* table) {
  return OpenTable<HostRowsTable>(spec, table, allocator, stream);
}

}  // namespace fusedrec
