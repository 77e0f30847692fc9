// Kernels outside the training step: contents of a table, checkpoints, upkeep, replicas. On a GPU their inputs and outputs are
// in host memory, except for the rows of replicas.
#include <limits>

#include "common/bucket.h"
#include "hash_table/kernels/table_kernel.h"

namespace fusedrec {
namespace {

absl::Status ReadSegment(OpKernelContext* ctx, const Table& table, int64_t* segment) {
  FUSEDREC_TRY(ScalarInput(ctx, 1, "segment", segment));
  if (*segment >= 0 && *segment < table.segments()) return absl::OkStatus();
  return Invalid("segment must lie in [0, ", table.segments(), "), got ", *segment, ".");
}

absl::Status ReadMoment(const char* name, const Tensor& clock, Moment* moment) {
  if (clock.shape() != TensorShape({2})) {
    return Invalid(name, " must have shape [2], got ", clock.shape().DebugString(), ". Remedy: that of TableClock.");
  }
  const absl::Span<const int64_t> numbers = In<int64_t>(clock);
  FUSEDREC_TRY(RequireIn(name, numbers[0], 0, kMostClock, "that of TableClock."));
  FUSEDREC_TRY(RequireIn(name, numbers[1], 0, kMostVersion, "that of TableClock."));
  *moment = {static_cast<uint32_t>(numbers[0]), static_cast<uint32_t>(numbers[1])};
  return absl::OkStatus();
}

absl::Status Statistics(OpKernelContext* ctx, Table* table, const TableCall&) {
  TableStatistics statistics;
  FUSEDREC_TRY(table->Statistics(&statistics));
  const int64_t segments = table->segments();
  std::vector<int64_t> counts;
  for (const SegmentStatistics& of : statistics.segments) {
    counts.insert(counts.end(), {of.keys, of.hits, of.inserts, of.evictions, of.refused, of.candidates});
  }
  statistics.traffic.resize(3 * segments);
  FUSEDREC_TRY(Give(ctx, 0, counts, TensorShape({segments, 6})));
  FUSEDREC_TRY(Give(ctx, 1, statistics.bytes));
  return Give(ctx, 2, statistics.traffic, TensorShape({segments, 3}));
}

absl::Status Keys(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment;
  Moment since;
  std::vector<int64_t> ids, handles;
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(ReadMoment("since", ctx->input(2), &since));
  FUSEDREC_TRY(table->Keys(call, segment, since, &ids, &handles));
  FUSEDREC_TRY(Give(ctx, 0, ids));
  return Give(ctx, 1, handles);
}

absl::Status ReadRecords(OpKernelContext* ctx, Table* table, const TableCall& call) {
  const Tensor& handles = ctx->input(1);
  Tensor* out;
  FUSEDREC_TRY(RequireRank("handles", handles, 1));
  FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({handles.NumElements(), table->record_bytes()}), &out));
  return table->ReadRecords(call, In<int64_t>(handles), static_cast<char*>(out->data()));
}

absl::Status Import(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment;
  const Tensor &ids = ctx->input(2), &records = ctx->input(3);
  const int64_t bytes = table->record_bytes(), n = ids.NumElements();
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(RequireRank("ids", ids, 1));
  FUSEDREC_TRY(RequireRank("records", records, 2));
  if (records.shape() != TensorShape({n, bytes})) {
    return Invalid("records must have shape [", n, ", ", bytes, "], got ", records.shape().DebugString(),
        ". They must come from a table of the same spec.");
  }
  FUSEDREC_TRY(RequireSize("the size of ids", n));
  FUSEDREC_TRY(RequireDistinct("ids", In<int64_t>(ids), "one record of each id."));
  const char* const first = static_cast<const char*>(records.data());
  for (int64_t i = 0; i < n; ++i) {
    uint32_t last;  // begins a record (row_records.h)
    std::memcpy(&last, first + i * bytes, sizeof(last));
    FUSEDREC_TRY(RequireIn("the clock in a record", last, 0, kMostClock, "a record of TableReadRecords."));
  }
  return table->Import(call, segment, In<int64_t>(ids), first);
}

absl::Status Remove(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment, removed;
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(RequireRank("ids", ctx->input(2), 1));
  FUSEDREC_TRY(table->Remove(call, segment, In<int64_t>(ctx->input(2)), &removed));
  return Give<int64_t>(ctx, 0, {removed}, TensorShape({}));
}

absl::Status Evict(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment, count, evicted;
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(ScalarInput(ctx, 2, "count", &count));
  if (count < 0) return Invalid("count must be >= 0, got ", count, ".");
  FUSEDREC_TRY(table->Evict(call, segment, count, &evicted));
  return Give<int64_t>(ctx, 0, {evicted}, TensorShape({}));
}

absl::Status Clear(OpKernelContext*, Table* table, const TableCall& call) { return table->Clear(call); }

absl::Status Tombstones(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment;
  std::vector<int64_t> ids;
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(table->Tombstones(call, segment, &ids));
  return Give(ctx, 0, ids);
}

absl::Status ForgetTombstones(OpKernelContext*, Table* table, const TableCall&) {
  table->ForgetTombstones();
  return absl::OkStatus();
}

absl::Status Candidates(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment;
  std::vector<int64_t> ids, counts;
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(table->Candidates(call, segment, &ids, &counts));
  FUSEDREC_TRY(Give(ctx, 0, ids));
  return Give(ctx, 1, counts);
}

absl::Status ImportCandidates(OpKernelContext* ctx, Table* table, const TableCall& call) {
  int64_t segment;
  const Tensor &ids = ctx->input(2), &counts = ctx->input(3);
  FUSEDREC_TRY(ReadSegment(ctx, *table, &segment));
  FUSEDREC_TRY(RequireRank("ids", ids, 1));
  if (counts.shape() != ids.shape()) {
    return Invalid(
        "counts must have the shape of ids, ", ids.shape().DebugString(), ", got ", counts.shape().DebugString(), ".");
  }
  for (const int64_t count : In<int64_t>(counts)) {
    if (count >= 1 && count <= std::numeric_limits<int32_t>::max()) continue;
    return Invalid("counts must lie in [1, 2^31), got ", count, ".");
  }
  return table->SetCandidates(call, segment, In<int64_t>(ids), In<int64_t>(counts));
}

absl::Status Clock(OpKernelContext* ctx, Table* table, const TableCall&) {
  const Moment clock = table->Clock();
  return Give<int64_t>(ctx, 0, {clock.lookups, clock.version});
}

absl::Status SetClock(OpKernelContext* ctx, Table* table, const TableCall&) {
  Moment clock;
  FUSEDREC_TRY(ReadMoment("clock", ctx->input(1), &clock));
  table->SetClock(clock);
  return absl::OkStatus();
}

absl::Status NoteTrained(OpKernelContext* ctx, Table* table, const TableCall& call) {
  Message message;
  FUSEDREC_TRY(RequireAveraged(table->spec()));
  FUSEDREC_TRY(ReadMessage(ctx, *table, call.is_on_cpu(), &message));
  return table->NoteTrained(call, message);
}

int AllocateUnsynced(void* context, int64_t entries, int64_t ids, int64_t** message, int64_t** headers) {
  auto* const ctx = static_cast<OpKernelContext*>(context);
  Tensor *message_out, *headers_out;
  if (!ctx->allocate_output(0, TensorShape({entries}), &message_out).ok()) return 1;
  if (!ctx->allocate_output(1, TensorShape({ids}), &headers_out).ok()) return 1;
  *message = Out<int64_t>(message_out).data();
  *headers = Out<int64_t>(headers_out).data();
  return 0;
}

absl::Status TakeUnsynced(OpKernelContext* ctx, Table* table, const TableCall& call) {
  FUSEDREC_TRY(RequireAveraged(table->spec()));
  return table->TakeUnsynced(call, {ctx, &AllocateUnsynced});
}

// Checks ids of all segments and their bounds, inputs `index` and `index + 1`.
absl::Status RequireGroupedIds(OpKernelContext* ctx, const Table& table, int index, const char* name) {
  const Tensor &ids = ctx->input(index), &splits = ctx->input(index + 1);
  FUSEDREC_TRY(RequireRank(name, ids, 1));
  FUSEDREC_TRY(RequireRank("segment_splits", splits, 1));
  const absl::Span<const int64_t> bounds = In<int64_t>(splits);
  if (static_cast<int64_t>(bounds.size()) == table.segments() + 1 && bounds.front() == 0 &&
      bounds.back() == ids.NumElements() && std::is_sorted(bounds.begin(), bounds.end())) {
    return absl::OkStatus();
  }
  return Invalid("segment_splits of ", name, " must be ", table.segments() + 1, " numbers from 0 to ",
      ids.NumElements(), " that do not decrease.");
}

absl::Status ReadNumbers(OpKernelContext* ctx, Table* table, const TableCall& call) {
  FUSEDREC_TRY(RequireGroupedIds(ctx, *table, 1, "ids"));
  const absl::Span<const int64_t> ids = In<int64_t>(ctx->input(1));
  const int64_t size = BucketedSize(ids.size());
  Tensor* out;
  FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({size, table->width()}), &out));
  return table->ReadNumbers(call, ids, In<int64_t>(ctx->input(2)), Out<float>(out).data(), size);
}

absl::Status Merge(OpKernelContext* ctx, Table* table, const TableCall& call) {
  const Tensor &ids = ctx->input(3), &numbers = ctx->input(5), &headers = ctx->input(6);
  FusedrecMerge in;
  FUSEDREC_TRY(RequireAveraged(table->spec()));
  FUSEDREC_TRY(RequireGroupedIds(ctx, *table, 1, "left"));
  FUSEDREC_TRY(RequireGroupedIds(ctx, *table, 3, "ids"));
  FUSEDREC_TRY(RequireRank("numbers", numbers, 2));
  const int64_t n = ids.NumElements(), width = table->width();
  if (numbers.dim_size(0) < n || numbers.dim_size(1) != width || headers.shape() != ids.shape()) {
    return Invalid("numbers must have shape [>= ", n, ", ", width, "] and headers [", n, "], got ",
        numbers.shape().DebugString(), " and ", headers.shape().DebugString(), ".");
  }
  FUSEDREC_TRY(ScalarInput(ctx, 7, "step", &in.step));
  in.left = In<int64_t>(ctx->input(1)).data();
  in.left_splits = In<int64_t>(ctx->input(2)).data();
  in.ids = In<int64_t>(ids).data();
  in.id_splits = In<int64_t>(ctx->input(4)).data();
  in.numbers = In<float>(numbers).data();
  in.headers = In<int64_t>(headers).data();
  return table->Merge(call, in);
}

#define FUSEDREC_SEGMENT .HostMemory("segment")
FUSEDREC_TABLE_KERNEL(Statistics, kAsTheyAre, .HostMemory("segments").HostMemory("bytes").HostMemory("traffic"));
FUSEDREC_TABLE_KERNEL(Keys, kRead, FUSEDREC_SEGMENT.HostMemory("since").HostMemory("ids").HostMemory("handles"));
FUSEDREC_TABLE_KERNEL(ReadRecords, kRead, .HostMemory("handles").HostMemory("records"));
FUSEDREC_TABLE_KERNEL(Import, kChange, FUSEDREC_SEGMENT.HostMemory("ids").HostMemory("records"));
FUSEDREC_TABLE_KERNEL(Remove, kChange, FUSEDREC_SEGMENT.HostMemory("ids").HostMemory("removed"));
// An eviction keeps the rows of the last lookup, which are on the device.
FUSEDREC_TABLE_KERNEL(Evict, kRead, FUSEDREC_SEGMENT.HostMemory("count").HostMemory("evicted"));
FUSEDREC_TABLE_KERNEL(Clear, kChange, );
FUSEDREC_TABLE_KERNEL(Tombstones, kAsTheyAre, FUSEDREC_SEGMENT.HostMemory("ids"));
FUSEDREC_TABLE_KERNEL(ForgetTombstones, kAsTheyAre, );
FUSEDREC_TABLE_KERNEL(Candidates, kAsTheyAre, FUSEDREC_SEGMENT.HostMemory("ids").HostMemory("counts"));
FUSEDREC_TABLE_KERNEL(ImportCandidates, kAsTheyAre, FUSEDREC_SEGMENT.HostMemory("ids").HostMemory("counts"));
FUSEDREC_TABLE_KERNEL(Clock, kAsTheyAre, .HostMemory("clock"));
FUSEDREC_TABLE_KERNEL(SetClock, kChange, .HostMemory("clock"));
FUSEDREC_TABLE_KERNEL(NoteTrained, kAsTheyAre, .HostMemory("received_splits"));
FUSEDREC_TABLE_KERNEL(TakeUnsynced, kAsTheyAre, );
FUSEDREC_TABLE_KERNEL(ReadNumbers, kAsTheyAre, .HostMemory("segment_splits"));
FUSEDREC_TABLE_KERNEL(Merge, kAsTheyAre, .HostMemory("left_splits").HostMemory("segment_splits").HostMemory("step"));
#undef FUSEDREC_SEGMENT

}  // namespace
}  // namespace fusedrec
