#include "hash_table/cuda/device_table.h"

#include "hash_table/cpu/rows/row_format.h"

namespace fusedrec {
namespace {

// Rows of a chunk: a power of two for about 32 MiB, which is little beside a device's memory and much beside a launch.
int64_t DeviceChunkRows(int64_t row_bytes) {
  constexpr int64_t kChunkBytes = int64_t{1} << 25, kLeast = 32;
  int64_t rows = kLeast;
  while (2 * rows * row_bytes <= kChunkBytes) rows *= 2;
  return rows;
}

struct IdLists {
  std::vector<int64_t>*ids, *numbers;

  FusedrecIdSink sink() {
    return {this, [](void* context, const int64_t* ids, const int64_t* numbers, int64_t count) {
              auto* const lists = static_cast<IdLists*>(context);
              lists->ids->assign(ids, ids + count);
              if (numbers != nullptr) lists->numbers->assign(numbers, numbers + count);
            }};
  }
};

class DeviceTable : public Table {
 public:
  explicit DeviceTable(const TableSpec& spec) : spec_(spec) {}
  // TensorFlow reuses the memory only for work that is enqueued later.
  ~DeviceTable() override { fusedrec_table_destroy(table_); }

  absl::Status Open(const FusedrecAllocator& allocator, void* stream) {
    const DeviceTexts texts(spec_);
    return StatusOf(fusedrec_table_create(&texts, &allocator, &table_, stream), "its segments");
  }

  const TableSpec& spec() const override { return spec_; }

  absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead*, const RowsOut& rows,
                      int32_t* inverse, int64_t* handles, int64_t* num_rows) override {
    const FusedrecMessage view = ViewOf(message);
    return StatusOf(fusedrec_table_lookup(table_, &view, window, static_cast<int64_t>(rows.storage), rows.data, rows.size,
                                          inverse, handles, num_rows, call.stream),
                    "the rows of a batch");
  }

  absl::Status LookAhead(const TableCall&, const Message&, const RowsOut&, absl::Span<int64_t>, Ahead*) override {
    return absl::OkStatus();
  }

  absl::Status Read(const TableCall& call, const Message& message, int64_t window, const Ahead*,
                    const RowsOut& rows) override {
    const FusedrecMessage view = ViewOf(message);
    return StatusOf(fusedrec_table_find(table_, &view, window, static_cast<int64_t>(rows.storage), rows.data, rows.size,
                                        nullptr, call.stream),
                    "a lookup");
  }

  absl::Status Apply(const TableCall& call, const Gradients& in, const Step& step, std::vector<int32_t>* left_out) override {
    const auto update = [&, view = ViewOf(in)](int32_t* places, int64_t* count) {
      return StatusOf(fusedrec_table_apply(table_, &view, &step, places, count, call.stream), "an update");
    };
    return LeaveOut(call, spec_, in.handles.size(), update, left_out);
  }

  absl::Status Accumulate(const TableCall& call, const Gradients& in, bool begin, std::vector<int32_t>* left_out) override {
    const auto update = [&, view = ViewOf(in)](int32_t* places, int64_t* count) {
      return StatusOf(fusedrec_table_accumulate(table_, &view, begin, places, count, call.stream), "the sums of gradients");
    };
    return LeaveOut(call, spec_, in.handles.size(), update, left_out);
  }

  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override {
    return StatusOf(fusedrec_table_apply_accumulated(table_, &step, call.stream), "an update");
  }

  absl::Status Statistics(TableStatistics* statistics) override {
    std::vector<int64_t> counts(6 * segments());
    const FusedrecTableTotals totals = Totals(counts.data());
    int64_t all = 0;
    for (auto of = counts.begin(); of != counts.end(); of += 6) {
      statistics->segments.push_back({of[0], of[1], of[2], of[3], of[4], of[5]});
      all += of[0];
    }
    statistics->bytes = {totals.line_bytes, totals.chunk_bytes, totals.cold_bytes, all - totals.cold_rows,
                         totals.cold_rows};
    return absl::OkStatus();
  }

  absl::Status Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                    std::vector<int64_t>* handles) override {
    std::vector<int64_t> counts(6 * segments());
    Totals(counts.data());
    int64_t most = counts[6 * segment], count;
    int64_t *device_ids, *device_handles;
    for (int answer = kDeviceMore; answer == kDeviceMore; most = count) {
      FUSEDREC_TRY(StatusOf(TakeMemory(call, most, &device_ids), "a list of keys"));
      FUSEDREC_TRY(StatusOf(TakeMemory(call, most, &device_handles), "a list of keys"));
      answer = fusedrec_table_keys(table_, segment, since.lookups, since.version, most, device_ids, device_handles, &count,
                                   call.stream);
      if (answer != kDeviceMore) FUSEDREC_TRY(StatusOf(answer, "a list of keys"));
    }
    ids->resize(count);
    handles->resize(count);
    FUSEDREC_TRY(StatusOf(fusedrec_copy_to_host(ids->data(), device_ids, count * sizeof(int64_t), call.stream), ""));
    return StatusOf(fusedrec_copy_to_host(handles->data(), device_handles, count * sizeof(int64_t), call.stream), "");
  }

  int64_t record_bytes() const override { return Totals().record_bytes; }

  absl::Status ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) override {
    const int64_t bytes = handles.size() * record_bytes();
    int64_t* device_handles;
    char* device_records;
    FUSEDREC_TRY(ToDevice(call, handles.data(), handles.size(), "an export", &device_handles));
    FUSEDREC_TRY(StatusOf(TakeMemory(call, bytes, &device_records), "an export"));
    FUSEDREC_TRY(StatusOf(
        fusedrec_table_read_records(table_, device_handles, handles.size(), device_records, call.stream), "an export"));
    return StatusOf(fusedrec_copy_to_host(records, device_records, bytes, call.stream), "an export");
  }

  absl::Status Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, const char* records) override {
    int64_t* device_ids;
    char* device_records;
    const char* const needs = "rows that are imported";
    FUSEDREC_TRY(ToDevice(call, ids.data(), ids.size(), needs, &device_ids));
    FUSEDREC_TRY(ToDevice(call, records, ids.size() * record_bytes(), needs, &device_records));
    return StatusOf(
        fusedrec_table_write_records(table_, segment, device_ids, ids.size(), device_records, call.stream), needs);
  }

  absl::Status Remove(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) override {
    int64_t* device_ids;
    FUSEDREC_TRY(ToDevice(call, ids.data(), ids.size(), "a removal", &device_ids));
    return StatusOf(fusedrec_table_remove(table_, segment, device_ids, ids.size(), removed, call.stream), "a removal");
  }

  absl::Status Evict(const TableCall& call, int64_t segment, int64_t count, int64_t* evicted) override {
    return StatusOf(fusedrec_table_evict(table_, segment, count, evicted, call.stream), "an eviction");
  }

  absl::Status Clear(const TableCall& call) override {
    return StatusOf(fusedrec_table_clear(table_, call.stream), "its segments");
  }

  absl::Status Tombstones(const TableCall& call, int64_t segment, std::vector<int64_t>* ids) override {
    IdLists lists{ids, nullptr};
    const FusedrecIdSink sink = lists.sink();
    return StatusOf(fusedrec_table_tombstones(table_, segment, &sink, call.stream), "a list of tombstones");
  }

  void ForgetTombstones() override { fusedrec_table_forget_tombstones(table_); }

  absl::Status Candidates(const TableCall& call, int64_t segment, std::vector<int64_t>* ids,
                          std::vector<int64_t>* counts) override {
    IdLists lists{ids, counts};
    const FusedrecIdSink sink = lists.sink();
    return StatusOf(fusedrec_table_candidates(table_, segment, &sink, call.stream), "a list of candidates");
  }

  absl::Status SetCandidates(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
      absl::Span<const int64_t> counts) override {
    return StatusOf(fusedrec_table_set_candidates(table_, segment, ids.data(), counts.data(), ids.size(), call.stream),
        "counts that are imported");
  }

  Moment Clock() override {
    const FusedrecTableTotals totals = Totals();
    return {static_cast<uint32_t>(totals.clock), static_cast<uint32_t>(totals.version)};
  }

  void SetClock(Moment clock) override { fusedrec_table_set_clock(table_, clock.lookups, clock.version); }

  absl::Status NoteTrained(const TableCall& call, const Message& message) override {
    const FusedrecMessage view = ViewOf(message);
    return StatusOf(fusedrec_table_note_trained(table_, &view, call.stream), "a message");
  }

  absl::Status TakeUnsynced(const TableCall& call, const FusedrecUnsyncedSink& sink) override {
    return StatusOf(fusedrec_table_take_unsynced(table_, &sink, call.stream), "a list of rows");
  }

  int64_t width() const override { return Totals().width; }

  absl::Status ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                           float* numbers, int64_t size) override {
    return StatusOf(fusedrec_table_read_numbers(table_, ids.data(), splits.data(), numbers, size, call.stream),
                    "a list of rows");
  }

  absl::Status Merge(const TableCall& call, const FusedrecMerge& merge) override {
    const int answer = fusedrec_table_merge(table_, &merge, call.stream);
    if (answer == kDeviceTableFull) return ReplicasAreFull(spec_, Totals().full_segment);
    return StatusOf(answer, "the rows of all replicas");
  }

 private:
  absl::Status StatusOf(int answer, const char* needs) const {
    return DeviceTableStatus(answer, spec_, needs, answer == kDeviceTableFull ? Totals().full_segment : 0);
  }

  FusedrecTableTotals Totals(int64_t* statistics = nullptr) const {
    FusedrecTableTotals totals;
    fusedrec_table_statistics(table_, statistics, &totals);
    return totals;
  }

  template <typename T>
  absl::Status ToDevice(const TableCall& call, const T* host, int64_t count, const char* needs, T** device) const {
    FUSEDREC_TRY(StatusOf(TakeMemory(call, count, device), needs));
    return StatusOf(fusedrec_copy_to_device(*device, host, count * sizeof(T), call.stream), needs);
  }

  const TableSpec spec_;
  FusedrecDeviceTable* table_ = nullptr;
};

}  // namespace

absl::Status MakeDeviceTable(const TableSpec& spec, const FusedrecAllocator& allocator, void* stream,
                             std::unique_ptr<Table>* table) {
  if (spec.host_rows) return MakeHostRowsTable(spec, allocator, stream, table);
  return OpenTable<DeviceTable>(spec, table, allocator, stream);
}

DeviceTexts::DeviceTexts(const TableSpec& spec) {
  for (const std::string& text : spec.texts) of_segments.push_back(text.c_str());
  const auto [wide, scalars] = SlotsOf(spec.rule);
  const RowFormat format(spec.storage, spec.dim, wide, scalars, false);
  texts = of_segments.data();
  segments = static_cast<int64_t>(of_segments.size());
  chunk_rows = DeviceChunkRows(format.stride());
}

absl::Status DeviceTableStatus(int answer, const TableSpec& spec, const char* needs, int64_t full_segment) {
  switch (answer) {
    case 0:
      return absl::OkStatus();
    case 1:
      return Invalid("message must hold blocks [counts of ", spec.seeds.size(),
          " segments | ids] of the sizes in received_splits, got counts that do not fit their block, or more than ",
          kDeviceTableMaxIds, " ids. The table is what it was. ",
          "Take both from RankPartition, and use smaller batches.");
    case kDeviceOutOfMemory:
      if (spec.host_rows) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "a table on a GPU with rows in host memory found no memory for ", needs, ", on the device or such as copies ",
            "need on the host. No row has another value; ids of the batch may have a row now that they had not. Remedy: ",
            "smaller batches", spec.hot_rows > 0 ? ", or fewer hot_rows_per_rank." : "."));
      }
      return absl::ResourceExhaustedError(absl::StrCat(
          "a table on a GPU found no device memory for ", needs, " (or has its ", kDeviceTableMaxRows,
          " rows). The table is what it was. Remedy: max_rows_per_rank with an eviction policy, more ranks, host_rows, or the ",
          "table in host memory: tf.device('/CPU:0')."));
    case kDeviceTableFull: {
      const Limits& limits = spec.limits[full_segment];
      return absl::ResourceExhaustedError(absl::StrCat(
          "max_rows_per_rank of ", spec.NameOf(full_segment), " is ", limits.max_rows, ", but a batch needs more rows while ",
          "rows of the latest lookups, whose gradients are to come, may not leave",
          limits.eviction == Eviction::kNone && limits.ttl == 0 ? " and eviction is 'none'" : "",
          ". The table is what it was. Remedy: a larger max_rows_per_rank, an eviction policy, or smaller batches."));
    }
    case kDeviceStale:
      return RowsAreStale("this training lookup");
    case kDeviceWaiting:
      return SumsAreWaiting();
    case kDeviceBadHandle:
      return Invalid(
          "handles must be of one TableLookup of this table (of one TableKeys for TableReadRecords), got others. "
          "Nothing has changed.");
    case kDeviceDoubled:
      return Invalid(
          "handles of an update, and ids of a merge, must be distinct, got one twice. The table is what it was. Take "
          "handles from one TableLookup, and name each id once.");
    case kDeviceClockEnds:
      return ClockEnds();
    case kDeviceBadInverse:
      return Invalid(
          "inverse must lie in [0, number of handles). Nothing was updated. Take handles and inverse from one "
          "TableLookup.");
  }
  return absl::InternalError(absl::StrCat("the table on the GPU failed: ", fusedrec_cuda_error_string(answer),
                                          " (CUDA error ", answer, ")."));
}

}  // namespace fusedrec
