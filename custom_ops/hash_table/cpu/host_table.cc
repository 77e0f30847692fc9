#include "hash_table/cpu/host_table.h"

#include <algorithm>
#include <cstring>

#include "common/hash.h"
#include "hash_table/cpu/rows/pages.h"

namespace fusedrec {

absl::Status HostTable::CheckAhead(const TableCall& call, const Message& message, const Ahead& ahead) const {
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

absl::Status HostTable::Lookup(const TableCall& call, const Message& message, const Ahead* ahead, const RowsOut& rows,
                               int32_t* inverse, int64_t* handles, int64_t* num_rows) {
  absl::Status done = ahead == nullptr ? absl::OkStatus() : CheckAhead(call, message, *ahead);
  if (!done.ok()) return done;
  std::vector<int64_t> distinct;
  uint32_t clock;
  const absl::Span<int32_t> numbers(inverse, message.num_ids);
  done = table_->Lookup(message, call.parallel_for, rows, numbers, &distinct, &clock, ahead);
  if (!done.ok()) return done;
  // The clock above the row number tells an update whether the rows are still where they were.
  std::transform(distinct.begin(), distinct.end(), handles,
                 [&](int64_t handle) { return handle < 0 ? handle : int64_t{clock} << 32 | handle; });
  *num_rows = distinct.size();
  return done;
}

absl::Status HostTable::LookAhead(const TableCall& call, const Message& message, const RowsOut& rows,
                                  absl::Span<int64_t> handles, Ahead* mark) {
  table_->LookAhead(message, call.parallel_for, rows, handles, &mark->version, &mark->moves);
  mark->fingerprint = table_->FingerprintOf(message, call.parallel_for);
  return absl::OkStatus();
}

absl::Status HostTable::Read(const TableCall& call, const Message& message, const Ahead* ahead, bool peeks,
                             const RowsOut& rows) {
  const absl::Status done = ahead == nullptr ? absl::OkStatus() : CheckAhead(call, message, *ahead);
  if (!done.ok()) return done;
  if (peeks) {
    table_->Peek(message, call.parallel_for, rows, ahead);
  } else {
    table_->Find(message, call.parallel_for, rows);
  }
  return done;
}

absl::Status HostTable::Prefetch(const TableCall&, const Message& message) {
  table_->Prefetch(message);
  return absl::OkStatus();
}

absl::Status HostTable::CheckGradients(const Gradients& grads, uint32_t* clock) const {
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
    const absl::Status distinct = RequireDistinct("handles", named, "handles and inverse of one TableLookup.");
    if (!distinct.ok()) return distinct;
  }
  *clock = first;
  if (first == 0 || !table_->IsStale(first)) return absl::OkStatus();
  return RowsAreStale(absl::StrCat("training lookup ", first));
}

absl::Status HostTable::Apply(const TableCall& call, const Gradients& in, const Step& step,
                              std::vector<int32_t>* left_out) {
  uint32_t clock;
  const absl::Status sound = CheckGradients(in, &clock);
  if (!sound.ok()) return sound;
  table_->Apply(in.handles, in.inverse, in.grads, in.storage, in.scale, step, call.parallel_for, clock, left_out);
  return absl::OkStatus();
}

absl::Status HostTable::Accumulate(const TableCall& call, const Gradients& in, bool begin,
                                   std::vector<int32_t>* left_out) {
  uint32_t clock;
  const absl::Status sound = CheckGradients(in, &clock);
  if (!sound.ok()) return sound;
  return table_->Accumulate(in.handles, in.inverse, in.grads, in.storage, in.scale, call.parallel_for, clock, left_out,
                            begin);
}

absl::Status HostTable::ApplyAccumulated(const TableCall& call, const Step& step) {
  table_->ApplyAccumulated(step, call.parallel_for);
  return absl::OkStatus();
}

absl::Status HostTable::Statistics(TableStatistics* statistics) {
  for (int64_t s = 0; s < segments(); ++s) statistics->segments.push_back(table_->Statistics(s));
  statistics->bytes = {table_->key_bytes(), table_->row_bytes(0), table_->row_bytes(1), table_->rows_in_pool(0),
                       table_->rows_in_pool(1)};
  return absl::OkStatus();
}

absl::Status HostTable::Keys(const TableCall& call, int64_t segment, Moment since, std::vector<int64_t>* ids,
                             std::vector<int64_t>* handles) {
  table_->Keys(segment, since, call.parallel_for, ids, handles);
  return absl::OkStatus();
}

absl::Status HostTable::ReadRecords(const TableCall& call, absl::Span<const int64_t> handles, char* records) {
  for (const int64_t handle : handles) {
    if (handle >= 0 && table_->IsHandle(handle)) continue;
    return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableKeys of this table, got ", handle, "."));
  }
  WantHugePages(records, handles.size() * record_bytes());  // a save holds training up meanwhile
  table_->records().Read(handles, call.parallel_for, records);
  return absl::OkStatus();
}

absl::Status HostTable::Import(const TableCall& call, int64_t segment, absl::Span<const int64_t> ids,
                               const char* records) {
  return table_->records().Write(segment, ids, records, call.parallel_for);
}

absl::Status HostTable::Remove(const TableCall&, int64_t segment, absl::Span<const int64_t> ids, int64_t* removed) {
  if (table_->HasWaiting()) return SumsAreWaiting();
  *removed = table_->Remove(segment, ids);
  return absl::OkStatus();
}

absl::Status HostTable::Evict(const TableCall&, int64_t segment, int64_t count, int64_t* evicted) {
  *evicted = table_->Evict(segment, count);
  return absl::OkStatus();
}

absl::Status HostTable::Clear(const TableCall&) {
  table_->Clear();
  return absl::OkStatus();
}

absl::Status HostTable::Tombstones(const TableCall&, int64_t segment, std::vector<int64_t>* ids) {
  *ids = table_->Tombstones(segment);
  return absl::OkStatus();
}

absl::Status HostTable::Candidates(const TableCall&, int64_t segment, std::vector<int64_t>* ids,
                                   std::vector<int64_t>* counts) {
  table_->Candidates(segment, ids, counts);
  return absl::OkStatus();
}

absl::Status HostTable::SetCandidates(const TableCall&, int64_t segment, absl::Span<const int64_t> ids,
                                      absl::Span<const int64_t> counts) {
  return table_->SetCandidates(segment, ids, counts);
}

absl::Status HostTable::NoteTrained(const TableCall&, const Message& message) {
  table_->replicas().NoteTrained(message);
  return absl::OkStatus();
}

absl::Status HostTable::TakeUnsynced(const TableCall&, const FusedrecUnsyncedSink& sink) {
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

absl::Status HostTable::ReadNumbers(const TableCall& call, absl::Span<const int64_t> ids,
                                    absl::Span<const int64_t> splits, float* numbers, int64_t size) {
  table_->replicas().ReadNumbers(ids, splits, call.parallel_for, numbers);
  const int64_t used = ids.size() * width();
  std::memset(numbers + used, 0, (size * width() - used) * sizeof(float));
  return absl::OkStatus();
}

absl::Status HostTable::Merge(const TableCall&, const FusedrecMerge& in) {
  const absl::Span<const int64_t> left_splits(in.left_splits, segments() + 1), splits(in.id_splits, segments() + 1);
  const absl::Span<const int64_t> ids(in.ids, splits.back());
  for (int64_t s = 0; s < segments(); ++s) {
    const absl::Status distinct =
        RequireDistinct("ids", ids.subspan(splits[s], splits[s + 1] - splits[s]), "one row of each id.");
    if (!distinct.ok()) return distinct;
  }
  return table_->replicas().Merge({in.left, static_cast<size_t>(left_splits.back())}, left_splits, ids, splits,
                                  in.numbers, {in.headers, ids.size()}, static_cast<uint32_t>(in.step));
}

}  // namespace fusedrec
