// A table whose ops run on a CPU: HashTable, with the checks of handles, look-aheads and contents that its callers need.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "common/hash.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cpu/rows/pages.h"
#include "hash_table/table.h"

namespace fusedrec {

class HostTable : public Table {
 public:
  explicit HostTable(std::unique_ptr<HashTable> table) : table_(std::move(table)) {}

  const TableSpec& spec() const override { return table_->spec(); }

  absl::Status Lookup(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                      const RowsOut& rows, int32_t* inverse, int64_t* handles, int64_t* num_rows) override {
    if (ahead != nullptr) FUSEDREC_TRY(CheckAhead(call, message, *ahead));
    std::vector<int64_t> distinct;
    uint32_t clock;
    const absl::Span<int32_t> numbers(inverse, message.num_ids);
    FUSEDREC_TRY(table_->Lookup(message, call.parallel_for, rows, numbers, &distinct, &clock, ahead, window));
    // The clock above the row number tells an update whether the rows are still where they were.
    std::transform(distinct.begin(), distinct.end(), handles,
                   [&](int64_t handle) { return handle < 0 ? handle : int64_t{clock} << 32 | handle; });
    *num_rows = distinct.size();
    return absl::OkStatus();
  }

  absl::Status LookAhead(const TableCall& call, const Message& message, const RowsOut& rows,
                         absl::Span<int64_t> handles, Ahead* mark) override {
    table_->LookAhead(message, call.parallel_for, rows, handles, &mark->version, &mark->moves);
    mark->fingerprint = table_->FingerprintOf(message, call.parallel_for);
    return absl::OkStatus();
  }

  absl::Status Read(const TableCall& call, const Message& message, int64_t window, const Ahead* ahead,
                    const RowsOut& rows) override {
    if (ahead != nullptr) FUSEDREC_TRY(CheckAhead(call, message, *ahead));
    if (window > 0) {
      table_->Peek(message, call.parallel_for, rows, ahead, window);
    } else {
      table_->Find(message, call.parallel_for, rows);
    }
    return absl::OkStatus();
  }

  absl::Status Prefetch(const TableCall&, const Message& message) override {
    table_->Prefetch(message);
    return absl::OkStatus();
  }

  absl::Status Apply(const TableCall& call, const Gradients& in, const Step& step,
                     std::vector<int32_t>* left_out) override {
    uint32_t clock;
    FUSEDREC_TRY(CheckGradients(in, &clock));
    table_->Apply(in.handles, in.inverse, in.grads, in.storage, in.scale, step, call.parallel_for, clock, left_out);
    return absl::OkStatus();
  }

  absl::Status Accumulate(const TableCall& call, const Gradients& in, bool begin,
                          std::vector<int32_t>* left_out) override {
    uint32_t clock;
    FUSEDREC_TRY(CheckGradients(in, &clock));
    return table_->Accumulate(in.handles, in.inverse, in.grads, in.storage, in.scale, call.parallel_for, clock, left_out,
                              begin);
  }

  absl::Status ApplyAccumulated(const TableCall& call, const Step& step) override {
    table_->ApplyAccumulated(step, call.parallel_for);
    return absl::OkStatus();
  }

  absl::Status Statistics(TableStatistics* statistics) override {
    for (int64_t s = 0; s < segments(); ++s) statistics->segments.push_back(table_->Statistics(s));
    statistics->bytes = {table_->key_bytes(), table_->row_bytes(0), table_->row_bytes(1), table_->rows_in_pool(0),
                         table_->rows_in_pool(1)};
    return absl::OkStatus();
  }

  absl::Status Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                    std::vector<int64_t>* handles) override {
    table_->Keys(segment, since, call.parallel_for, ids, handles);
    return absl::OkStatus();
  }

  int64_t record_bytes() const override { return table_->records().bytes(); }

  absl::Status ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) override {
    for (const int64_t handle : handles) {
      if (handle >= 0 && table_->IsHandle(handle)) continue;
      return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableKeys of this table, got ", handle, "."));
    }
    WantHugePages(records, handles.size() * record_bytes());  // a save holds training up meanwhile
    table_->records().Read(handles, call.parallel_for, records);
    return absl::OkStatus();
  }

  absl::Status Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                      const char* records) override {
    return table_->records().Write(segment, ids, records, call.parallel_for);
  }

  absl::Status Remove(const TableCall&, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) override {
    if (table_->HasWaiting()) return SumsAreWaiting();
    *removed = table_->Remove(segment, ids);
    return absl::OkStatus();
  }

  absl::Status Evict(const TableCall&, int64_t segment, int64_t count, int64_t* evicted) override {
    *evicted = table_->Evict(segment, count);
    return absl::OkStatus();
  }

  absl::Status Clear(const TableCall&) override {
    table_->Clear();
    return absl::OkStatus();
  }

  absl::Status Tombstones(const TableCall&, int64_t segment, std::vector<int64_t>* ids) override {
    *ids = table_->Tombstones(segment);
    return absl::OkStatus();
  }

  void ForgetTombstones() override { table_->ForgetTombstones(); }

  absl::Status Candidates(const TableCall&, int64_t segment, std::vector<int64_t>* ids,
                          std::vector<int64_t>* counts) override {
    table_->Candidates(segment, ids, counts);
    return absl::OkStatus();
  }

  absl::Status SetCandidates(const TableCall&, int64_t segment, absl::Span<const int64_t> ids,
                             absl::Span<const int64_t> counts) override {
    return table_->SetCandidates(segment, ids, counts);
  }

  Moment Clock() override { return {table_->clock(), table_->version()}; }
  void SetClock(Moment clock) override { table_->SetClock(clock.lookups, clock.version); }

  absl::Status NoteTrained(const TableCall&, const Message& message) override {
    table_->replicas().NoteTrained(message);
    return absl::OkStatus();
  }

  absl::Status TakeUnsynced(const TableCall&, const FusedrecUnsyncedSink& sink) override {
    std::vector<int64_t> counts, ids, headers;
    table_->replicas().TakeUnsynced(&counts, &ids, &headers);
    int64_t *message_out, *headers_out;
    const int64_t entries = counts.size() + ids.size(), n = headers.size();
    if (sink.allocate(sink.context, entries, n, &message_out, &headers_out) != 0) {
      return absl::ResourceExhaustedError("there is no memory for the ids that this replica trained or removed.");
    }
    std::copy(ids.begin(), ids.end(), std::copy(counts.begin(), counts.end(), message_out));
    std::copy(headers.begin(), headers.end(), headers_out);
    return absl::OkStatus();
  }

  int64_t width() const override { return table_->format(0).numbers(); }

  absl::Status ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids, absl::Span<const int64_t> splits,
                           float* numbers, int64_t size) override {
    table_->replicas().ReadNumbers(ids, splits, call.parallel_for, numbers);
    const int64_t used = ids.size() * width();
    std::memset(numbers + used, 0, (size * width() - used) * sizeof(float));
    return absl::OkStatus();
  }

  absl::Status Merge(const TableCall&, const FusedrecMerge& in) override {
    const absl::Span<const int64_t> left_splits(in.left_splits, segments() + 1), splits(in.id_splits, segments() + 1);
    const absl::Span<const int64_t> ids(in.ids, splits.back());
    for (int64_t s = 0; s < segments(); ++s) {
      FUSEDREC_TRY(RequireDistinct("ids", ids.subspan(splits[s], splits[s + 1] - splits[s]), "one row of each id."));
    }
    return table_->replicas().Merge({in.left, static_cast<size_t>(left_splits.back())}, left_splits, ids, splits,
                                    in.numbers, {in.headers, ids.size()}, static_cast<uint32_t>(in.step));
  }

 protected:
  const std::unique_ptr<HashTable> table_;

 private:
  // Checks a look-ahead of this message.
  absl::Status CheckAhead(const TableCall& call, const Message& message, const Ahead& ahead) const {
    if (ahead.fingerprint != table_->FingerprintOf(message, call.parallel_for)) {
      return absl::InvalidArgumentError(
          "message must be that of the look-ahead, of the same table, got other ids or another order. The table is what it "
          "was. Take a look-ahead and its lookup from one message.");
    }
    for (const int64_t handle : ahead.handles) {
      if (table_->IsHandle(handle)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("handles_ahead must be of a TableLookAhead of this table, got ", handle, "."));
    }
    return absl::OkStatus();
  }

  // Checks handles and inverse. *clock: of the handles' lookup, 0 where none has a row.
  absl::Status CheckGradients(const Gradients& grads, uint32_t* clock) const {
    const int64_t rows = grads.handles.size();
    for (const int32_t number : grads.inverse) {
      if (number < 0 || number >= rows) {
        return absl::InvalidArgumentError(absl::StrCat("inverse must lie in [0, ", rows, "), got ", number,
                                                       ". Take handles and inverse from one TableLookup."));
      }
    }
    uint32_t first = 0;
    uint64_t sum = 0;
    for (const int64_t handle : grads.handles) {
      if (handle == kNoRow) continue;
      if (handle < 0 || !table_->IsHandle(handle & 0xffffffff)) {
        return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableLookup of this table, got ", handle, "."));
      }
      const uint32_t of_handle = static_cast<uint32_t>(handle >> 32);
      if (of_handle == 0 || (first != 0 && of_handle != first)) {
        return absl::InvalidArgumentError(absl::StrCat("handles must be of one TableLookup, got some of lookup ", first,
                                                       " and some of lookup ", of_handle, "."));
      }
      first = of_handle;
      sum += Mix64(static_cast<uint32_t>(handle));
    }
    if (!table_->AreHandlesOf(first, sum)) {  // only some of that lookup's, or some twice
      std::vector<int64_t> named;
      for (const int64_t handle : grads.handles) {
        if (handle != kNoRow) named.push_back(handle);
      }
      FUSEDREC_TRY(RequireDistinct("handles", named, "handles and inverse of one TableLookup."));
    }
    *clock = first;
    if (first == 0 || !table_->IsStale(first)) return absl::OkStatus();
    return RowsAreStale(absl::StrCat("training lookup ", first));
  }
};

}  // namespace fusedrec
