// Kernels of the training step: the resource itself, and lookups; hash_table_update_kernel.cc has the updates.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bucket.h"
#include "hash_table/kernels/table_resource.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;

class HashTableOp : public tensorflow::ResourceOpKernel<TableResource> {
 public:
  explicit HashTableOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadAttributes(ctx, kOnCpu, &spec_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &anonymous_));
  }

  void Compute(OpKernelContext* ctx) override {
    if (!anonymous_) return ResourceOpKernel::Compute(ctx);
    TableResource* resource = nullptr;
    OP_REQUIRES_OK(ctx, CreateResource(&resource));
    OP_REQUIRES_OK(ctx, OutputOwningHandle(ctx, resource));
  }

 private:
  absl::Status CreateResource(TableResource** resource) override {
    auto table = HashTable::Make(spec_);
    if (!table.ok()) return table.status();
    *resource = new TableResource(*std::move(table));
    return absl::OkStatus();
  }

  TableSpec spec_;
  bool anonymous_;
};

namespace {

// Allocates output 0: [V rounded up to a bucketed size, D], zeros after V.
template <typename T>
absl::Status AllocateRows(OpKernelContext* ctx, const HashTable& table, int64_t num_ids, RowSink* rows) {
  const int64_t padded = BucketedSize(num_ids), dim = table.spec().dim;
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({padded, dim}), &out));
  T* data = out->flat<T>().data();
  std::memset(static_cast<void*>(data + num_ids * dim), 0, (padded - num_ids) * dim * sizeof(T));
  *rows = {data, StorageFor<T>()};
  return absl::OkStatus();
}

// A kernel that answers rows: its attribute `dim`, from which static shapes come, must be the table's.
template <absl::Status (*kRun)(OpKernelContext*, HashTable*)>
class RowsOp : public TableKernel {
 public:
  explicit RowsOp(OpKernelConstruction* ctx) : TableKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_)); }

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    TF_RETURN_IF_ERROR(RequireDim(table->spec(), dim_));
    return kRun(ctx, table);
  }

 private:
  int64_t dim_;
};

// Looks up into `rows` and allocates the last two outputs.
absl::Status LookUpInto(OpKernelContext* ctx, HashTable* table, const Message& message, const RowSink& rows,
                        const Ahead* ahead) {
  const int of_handles = ctx->num_outputs() - 2;
  Tensor *handles_out, *inverse;
  TF_RETURN_IF_ERROR(ctx->allocate_output(of_handles + 1, TensorShape({message.num_ids}), &inverse));
  std::vector<int64_t> handles;
  uint32_t clock;
  TF_RETURN_IF_ERROR(table->Lookup(message, CpuPool(ctx), rows, Out<int32_t>(inverse), &handles, &clock, ahead));
  const TensorShape distinct({static_cast<int64_t>(handles.size())});
  TF_RETURN_IF_ERROR(ctx->allocate_output(of_handles, distinct, &handles_out));
  // The clock above the row number tells an update whether the rows are still where they were.
  std::transform(handles.begin(), handles.end(), handles_out->flat<int64_t>().data(),
                 [&](int64_t handle) { return handle < 0 ? handle : int64_t{clock} << 32 | handle; });
  return absl::OkStatus();
}

template <typename T>
absl::Status Lookup(OpKernelContext* ctx, HashTable* table) {
  Message message;
  RowSink rows;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
  return LookUpInto(ctx, table, message, rows, nullptr);
}

template <typename T>
absl::Status LookAhead(OpKernelContext* ctx, HashTable* table) {
  Message message;
  RowSink rows;
  Tensor *handles, *mark;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({message.num_ids}), &handles));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({3}), &mark));
  int64_t* state = mark->flat<int64_t>().data();
  table->LookAhead(message, CpuPool(ctx), rows, Out<int64_t>(handles), &state[0], &state[1]);
  state[2] = static_cast<int64_t>(table->FingerprintOf(message, CpuPool(ctx)));
  return absl::OkStatus();
}

// Reads inputs 3 to 5, a look-ahead of the same message, and gives its rows on as output 0.
template <typename T>
absl::Status TakeAhead(OpKernelContext* ctx, const HashTable& table, const Message& message, RowSink* rows_out,
                       Ahead* ahead) {
  const Tensor &rows = ctx->input(3), &handles = ctx->input(4), &mark = ctx->input(5);
  const int64_t num_ids = message.num_ids;
  TF_RETURN_IF_ERROR(RequireRank("rows_ahead", rows, 2));
  TF_RETURN_IF_ERROR(RequireRank("handles_ahead", handles, 1));
  if (mark.dims() != 1 || mark.dim_size(0) != 3 || handles.NumElements() != num_ids || rows.dim_size(0) < num_ids ||
      rows.dim_size(1) != table.spec().dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rows_ahead, handles_ahead and mark must be of a TableLookAhead of the same ", num_ids, " ids, got shapes ",
        rows.shape().DebugString(), ", ", handles.shape().DebugString(), " and ", mark.shape().DebugString(), "."));
  }
  if (static_cast<uint64_t>(mark.flat<int64_t>()(2)) != table.FingerprintOf(message, CpuPool(ctx))) {
    return absl::InvalidArgumentError(
        "message must be that of the look-ahead, of the same table, got other ids or another order. The table is what it "
        "was. Take a look-ahead and its lookup from one message.");
  }
  for (const int64_t handle : In<int64_t>(handles)) {
    if (table.IsHandle(handle)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("handles_ahead must be of a TableLookAhead of this table, got ", handle, "."));
  }
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({3}, 0, rows.shape(), &out));
  if (out->data() != rows.data()) std::memcpy(out->data(), rows.data(), rows.TotalBytes());
  *rows_out = {out->flat<T>().data(), StorageFor<T>()};
  *ahead = {In<int64_t>(handles), mark.flat<int64_t>()(0), mark.flat<int64_t>()(1)};
  return absl::OkStatus();
}

template <typename T>
absl::Status Refresh(OpKernelContext* ctx, HashTable* table) {
  Message message;
  RowSink rows;
  Ahead ahead;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  TF_RETURN_IF_ERROR(TakeAhead<T>(ctx, *table, message, &rows, &ahead));
  return LookUpInto(ctx, table, message, rows, &ahead);
}

template <typename T>
absl::Status Peek(OpKernelContext* ctx, HashTable* table) {
  Message message;
  RowSink rows;
  Ahead ahead;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  const bool has_ahead = ctx->input(3).NumElements() > 0 || ctx->input(4).NumElements() > 0;
  if (has_ahead) {
    TF_RETURN_IF_ERROR(TakeAhead<T>(ctx, *table, message, &rows, &ahead));
  } else {
    TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
  }
  table->Peek(message, CpuPool(ctx), rows, has_ahead ? &ahead : nullptr);
  return absl::OkStatus();
}

absl::Status Touch(OpKernelContext* ctx, HashTable* table) {
  Message message;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  return LookUpInto(ctx, table, message, {}, nullptr);
}

template <typename T>
absl::Status Find(OpKernelContext* ctx, HashTable* table) {
  Message message;
  RowSink rows;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
  table->Find(message, CpuPool(ctx), rows);
  return absl::OkStatus();
}

absl::Status Prefetch(OpKernelContext* ctx, HashTable* table) {
  Message message;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  table->Prefetch(message);
  return absl::OkStatus();
}

}  // namespace

REGISTER_KERNEL_BUILDER(Name("Fusedrec>HashTable").Device(DEVICE_CPU), HashTableOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TablePrefetch").Device(DEVICE_CPU), TableFunctionOp<Prefetch>);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableTouch").Device(DEVICE_CPU), TableFunctionOp<Touch>);
#define FUSEDREC_REGISTER_ROWS(NAME, T) \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>Table" #NAME).Device(DEVICE_CPU).TypeConstraint<T>("T"), RowsOp<NAME<T>>);
#define FUSEDREC_REGISTER(T)           \
  FUSEDREC_REGISTER_ROWS(Lookup, T)    \
  FUSEDREC_REGISTER_ROWS(LookAhead, T) \
  FUSEDREC_REGISTER_ROWS(Refresh, T)   \
  FUSEDREC_REGISTER_ROWS(Peek, T)      \
  FUSEDREC_REGISTER_ROWS(Find, T)
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER
#undef FUSEDREC_REGISTER_ROWS

}  // namespace fusedrec
