// Kernels outside the training step: sizes, statistics, eviction, checkpoints.
#include <algorithm>
#include <limits>
#include <vector>

#include "hash_table/table_resource.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

static absl::Status Give(OpKernelContext* ctx, int index, const std::vector<int64_t>& values) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(index, TensorShape({static_cast<int64_t>(values.size())}), &out));
  std::copy(values.begin(), values.end(), out->flat<int64_t>().data());
  return absl::OkStatus();
}

static absl::Status GiveScalar(OpKernelContext* ctx, int64_t value) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &out));
  out->scalar<int64_t>()() = value;
  return absl::OkStatus();
}

static absl::Status ReadSegment(OpKernelContext* ctx, const HashTable& table, int64_t* segment) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 1, "segment", segment));
  return RequireSegment(*segment, table.segments());
}

// What a kernel does, as a function of its context and table.
template <absl::Status (*kRun)(OpKernelContext*, HashTable*)>
class TableFunctionOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override { return kRun(ctx, table); }
};

static absl::Status Statistics(OpKernelContext* ctx, HashTable* table) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({table->segments(), 6}), &out));
  auto matrix = out->matrix<int64_t>();
  for (int64_t s = 0; s < table->segments(); ++s) {
    const SegmentStatistics of = table->Statistics(s);
    const int64_t row[] = {of.keys, of.hits, of.inserts, of.evictions, of.refused, of.candidates};
    for (int i = 0; i < 6; ++i) matrix(s, i) = row[i];
  }
  return Give(ctx, 1, {table->key_bytes(), table->row_bytes(0), table->row_bytes(1), table->rows_in_pool(0),
                       table->rows_in_pool(1)});
}

static absl::Status Size(OpKernelContext* ctx, HashTable* table) {
  std::vector<int64_t> sizes;
  for (int64_t s = 0; s < table->segments(); ++s) sizes.push_back(table->size(s));
  return Give(ctx, 0, sizes);
}

static absl::Status Keys(OpKernelContext* ctx, HashTable* table) {
  int64_t segment, since;
  std::vector<int64_t> ids, handles;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "since", &since));
  if (since < 0) return absl::InvalidArgumentError(absl::StrCat("since must be >= 0, got ", since, "."));
  table->Keys(segment, static_cast<uint32_t>(since), CpuPool(ctx), &ids, &handles);
  TF_RETURN_IF_ERROR(Give(ctx, 0, ids));
  return Give(ctx, 1, handles);
}

static absl::Status ReadRecords(OpKernelContext* ctx, HashTable* table) {
  const Tensor& handles = ctx->input(1);
  TF_RETURN_IF_ERROR(RequireRank("handles", handles, 1));
  for (const int64_t handle : In<int64_t>(handles)) {
    if (handle < 0 || !table->IsHandle(handle)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableKeys of this table, got ", handle, "."));
    }
  }
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({handles.NumElements(), table->record_bytes()}), &out));
  table->ReadRecords(In<int64_t>(handles), CpuPool(ctx), reinterpret_cast<char*>(out->flat<uint8_t>().data()));
  return absl::OkStatus();
}

static absl::Status Import(OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  const Tensor &ids = ctx->input(2), &records = ctx->input(3);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireRecords(ids, records, table->record_bytes()));
  return table->WriteRecords(segment, In<int64_t>(ids),
                             reinterpret_cast<const char*>(records.flat<uint8_t>().data()), CpuPool(ctx));
}

static absl::Status Remove(OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireRank("ids", ctx->input(2), 1));
  if (table->HasWaiting()) {
    return absl::FailedPreconditionError(
        "rows cannot be removed while accumulated gradients wait for their update. Remove them after it.");
  }
  return GiveScalar(ctx, table->Remove(segment, In<int64_t>(ctx->input(2))));
}

static absl::Status Evict(OpKernelContext* ctx, HashTable* table) {
  int64_t segment, count;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "count", &count));
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("count must be >= 0, got ", count, "."));
  return GiveScalar(ctx, table->Evict(segment, count));
}

static absl::Status Tombstones(OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  return Give(ctx, 0, table->Tombstones(segment));
}

static absl::Status ForgetTombstones(OpKernelContext*, HashTable* table) {
  table->ForgetTombstones();
  return absl::OkStatus();
}

static absl::Status Candidates(OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  std::vector<int64_t> ids, counts;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  table->Candidates(segment, &ids, &counts);
  TF_RETURN_IF_ERROR(Give(ctx, 0, ids));
  return Give(ctx, 1, counts);
}

static absl::Status ImportCandidates(OpKernelContext* ctx, HashTable* table) {
  int64_t segment;
  const Tensor &ids = ctx->input(2), &counts = ctx->input(3);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, *table, &segment));
  TF_RETURN_IF_ERROR(RequireRank("ids", ids, 1));
  if (counts.shape() != ids.shape()) {
    return absl::InvalidArgumentError(absl::StrCat("counts must have the shape of ids, ", ids.shape().DebugString(),
                                                   ", got ", counts.shape().DebugString(), "."));
  }
  for (const int64_t count : In<int64_t>(counts)) {
    if (count < 1 || count > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat("counts must lie in [1, 2^31), got ", count, "."));
    }
  }
  return table->SetCandidates(segment, In<int64_t>(ids), In<int64_t>(counts));
}

static absl::Status Clock(OpKernelContext* ctx, HashTable* table) {
  return Give(ctx, 0, {table->clock(), table->version()});
}

static absl::Status SetClock(OpKernelContext* ctx, HashTable* table) {
  const Tensor& clock = ctx->input(1);
  TF_RETURN_IF_ERROR(RequireClock(clock));
  table->SetClock(static_cast<uint32_t>(clock.flat<int64_t>()(0)), static_cast<uint32_t>(clock.flat<int64_t>()(1)));
  return absl::OkStatus();
}

static absl::Status Clear(OpKernelContext*, HashTable* table) {
  table->Clear();
  return absl::OkStatus();
}

#define FUSEDREC_REGISTER(NAME, FUNCTION) \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" NAME).Device(DEVICE_CPU), TableFunctionOp<FUNCTION>)
FUSEDREC_REGISTER("TableStatistics", Statistics);
FUSEDREC_REGISTER("TableSize", Size);
FUSEDREC_REGISTER("TableKeys", Keys);
FUSEDREC_REGISTER("TableReadRecords", ReadRecords);
FUSEDREC_REGISTER("TableImport", Import);
FUSEDREC_REGISTER("TableRemove", Remove);
FUSEDREC_REGISTER("TableEvict", Evict);
FUSEDREC_REGISTER("TableTombstones", Tombstones);
FUSEDREC_REGISTER("TableForgetTombstones", ForgetTombstones);
FUSEDREC_REGISTER("TableCandidates", Candidates);
FUSEDREC_REGISTER("TableImportCandidates", ImportCandidates);
FUSEDREC_REGISTER("TableClock", Clock);
FUSEDREC_REGISTER("TableSetClock", SetClock);
FUSEDREC_REGISTER("TableClear", Clear);
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
