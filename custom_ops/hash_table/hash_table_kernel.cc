// Kernels of the training step: the resource itself, lookups, updates.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/bucket.h"
#include "hash_table/table_resource.h"
#include "rank_partition/rank_partition.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class HashTableOp : public tensorflow::ResourceOpKernel<TableResource> {
 public:
  explicit HashTableOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    int64_t dim;
    std::string storage, distribution, eviction;
    std::vector<int64_t> seeds;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seeds", &seeds));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segment_names", &spec_.names));
    OP_REQUIRES(ctx, spec_.names.empty() || spec_.names.size() == seeds.size(),
                absl::InvalidArgumentError(absl::StrCat("segment_names must be empty or one for each of the ",
                                                        seeds.size(), " seeds, got ", spec_.names.size(), ".")));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("storage", &storage));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stochastic_rounding", &spec_.stochastic_rounding));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distribution", &distribution));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("a", &a_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("b", &b_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rule", &rule_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("hyperparameters", &hyperparameters_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_rows", &spec_.max_rows));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("eviction", &eviction));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ttl", &spec_.ttl));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("admission_count", &spec_.admission_count));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_candidates", &spec_.max_candidates));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("record_tombstones", &spec_.record_tombstones));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("hot_after", &spec_.hot_after));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("memory_budget", &spec_.memory_budget));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tier_folder", &spec_.tier_folder));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("window", &spec_.window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("averaged", &spec_.averaged));
    auto known = StorageOf(storage);
    OP_REQUIRES_OK(ctx, known.status());
    spec_.dim = dim;
    spec_.storage = *known;
    spec_.a = a_;
    spec_.b = b_;
    spec_.seeds.assign(seeds.begin(), seeds.end());
    spec_.distribution = DistributionOf(distribution);
    spec_.eviction = eviction == "lru" ? Eviction::kLru : eviction == "lfu" ? Eviction::kLfu : Eviction::kNone;
  }

 private:
  absl::Status CreateResource(TableResource** resource) override {
    auto optimizer = Optimizer::Make(rule_, hyperparameters_);
    if (!optimizer.ok()) return optimizer.status();
    auto table = HashTable::Make(spec_, *std::move(optimizer));
    if (!table.ok()) return table.status();
    *resource = new TableResource(*std::move(table));
    return absl::OkStatus();
  }

  TableSpec spec_;
  float a_, b_;
  std::string rule_;
  std::vector<float> hyperparameters_;
};

// Reads inputs 1 and 2.
static absl::Status ReadMessage(OpKernelContext* ctx, const HashTable& table, Message* message) {
  const Tensor &entries = ctx->input(1), &splits = ctx->input(2);
  TF_RETURN_IF_ERROR(RequireRank("message", entries, 1));
  TF_RETURN_IF_ERROR(RequireRank("received_splits", splits, 1));
  *message = {In<int64_t>(entries), In<int32_t>(splits), 0};
  TF_RETURN_IF_ERROR(CheckMessage(message->entries, message->source_splits, table.segments()));
  message->num_ids = entries.NumElements() - splits.NumElements() * table.segments();
  return absl::OkStatus();
}

// Allocates output 0: [V rounded up to a bucketed size, D], zeros behind V.
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
class RowsKernel : public TableKernel {
 public:
  explicit RowsKernel(OpKernelConstruction* ctx) : TableKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_)); }

 protected:
  absl::Status CheckDim(const HashTable& table) const {
    if (dim_ == table.spec().dim) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("dim must be that of the table, ", table.spec().dim, ", got ", dim_, "."));
  }

 private:
  int64_t dim_;
};

// Looks up into `rows` and allocates outputs 1 and 2.
static absl::Status LookUp(OpKernelContext* ctx, HashTable* table, const Message& message, const RowSink& rows,
                           const Ahead* ahead) {
  Tensor *handles_out, *inverse;
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({message.num_ids}), &inverse));
  std::vector<int64_t> handles;
  uint32_t clock;
  TF_RETURN_IF_ERROR(table->Lookup(message, CpuPool(ctx), rows, Out<int32_t>(inverse), &handles, &clock, ahead));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({static_cast<int64_t>(handles.size())}), &handles_out));
  // The clock above the row number tells an update whether the rows are still where they were.
  std::transform(handles.begin(), handles.end(), handles_out->flat<int64_t>().data(),
                 [&](int64_t handle) { return handle < 0 ? handle : int64_t{clock} << 32 | handle; });
  return absl::OkStatus();
}

template <typename T>
class TableLookupOp : public RowsKernel {
 public:
  using RowsKernel::RowsKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    Message message;
    RowSink rows;
    TF_RETURN_IF_ERROR(CheckDim(*table));
    TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
    TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
    return LookUp(ctx, table, message, rows, nullptr);
  }
};

template <typename T>
class TableLookAheadOp : public RowsKernel {
 public:
  using RowsKernel::RowsKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    Message message;
    RowSink rows;
    Tensor *handles, *mark;
    TF_RETURN_IF_ERROR(CheckDim(*table));
    TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
    TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({message.num_ids}), &handles));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({2}), &mark));
    int64_t* of_table = mark->flat<int64_t>().data();
    table->LookAhead(message, CpuPool(ctx), rows, Out<int64_t>(handles), &of_table[0], &of_table[1]);
    return absl::OkStatus();
  }
};

template <typename T>
class TableRefreshOp : public RowsKernel {
 public:
  using RowsKernel::RowsKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    Message message;
    TF_RETURN_IF_ERROR(CheckDim(*table));
    TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
    const Tensor &rows = ctx->input(3), &handles = ctx->input(4), &mark = ctx->input(5);
    TF_RETURN_IF_ERROR(RequireRank("rows_ahead", rows, 2));
    TF_RETURN_IF_ERROR(RequireRank("handles_ahead", handles, 1));
    if (mark.dims() != 1 || mark.dim_size(0) != 2 || handles.NumElements() != message.num_ids ||
        rows.dim_size(0) < message.num_ids || rows.dim_size(1) != table->spec().dim) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rows_ahead, handles_ahead and mark must be of a TableLookAhead of the same ", message.num_ids, " ids, got ",
          "shapes ", rows.shape().DebugString(), ", ", handles.shape().DebugString(), " and ",
          mark.shape().DebugString(), "."));
    }
    for (const int64_t handle : In<int64_t>(handles)) {
      if (table->IsHandle(handle)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("handles_ahead must be of a TableLookAhead of this table, got ", handle, "."));
    }
    Tensor* out;
    TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({3}, 0, rows.shape(), &out));
    if (out->data() != rows.data()) std::memcpy(out->data(), rows.data(), rows.TotalBytes());
    const Ahead ahead{In<int64_t>(handles), mark.flat<int64_t>()(0), mark.flat<int64_t>()(1)};
    return LookUp(ctx, table, message, {out->flat<T>().data(), StorageFor<T>()}, &ahead);
  }
};

template <typename T>
class TableFindOp : public RowsKernel {
 public:
  using RowsKernel::RowsKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    Message message;
    RowSink rows;
    TF_RETURN_IF_ERROR(CheckDim(*table));
    TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
    TF_RETURN_IF_ERROR(AllocateRows<T>(ctx, *table, message.num_ids, &rows));
    table->Find(message, CpuPool(ctx), rows);
    return absl::OkStatus();
  }
};

class TablePrefetchOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    Message message;
    TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
    table->Prefetch(message);
    return absl::OkStatus();
  }
};

// Checks inputs 1 to 4: handles, inverse, grads, scale. Gives the clock of the handles' lookup, 0 where none has a row.
static absl::Status CheckGradients(OpKernelContext* ctx, const HashTable& table, uint32_t* clock) {
  const Tensor &handles = ctx->input(1), &inverse = ctx->input(2), &grads = ctx->input(3);
  TF_RETURN_IF_ERROR(RequireRank("handles", handles, 1));
  TF_RETURN_IF_ERROR(RequireRank("inverse", inverse, 1));
  TF_RETURN_IF_ERROR(RequireRank("grads", grads, 2));
  TF_RETURN_IF_ERROR(RequireRank("scale", ctx->input(4), 0));
  if (grads.dim_size(0) < inverse.NumElements() || grads.dim_size(1) != table.spec().dim) {
    return absl::InvalidArgumentError(absl::StrCat("grads must have shape [>= ", inverse.NumElements(), ", ",
                                                   table.spec().dim, "], one row for each received id, got ",
                                                   grads.shape().DebugString(), "."));
  }
  const int64_t rows = handles.NumElements();
  for (const int32_t number : In<int32_t>(inverse)) {
    if (number < 0 || number >= rows) {
      return absl::InvalidArgumentError(absl::StrCat("inverse must lie in [0, ", rows, "), got ", number,
                                                     ". Take handles and inverse from one TableLookup."));
    }
  }
  uint32_t first = 0;
  for (const int64_t handle : In<int64_t>(handles)) {
    if (handle == kNoRow) continue;
    if (handle < 0 || !table.IsHandle(handle & 0xffffffff)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of a TableLookup of this table, got ", handle, "."));
    }
    const uint32_t of_handle = static_cast<uint32_t>(handle >> 32);
    if (of_handle == 0 || (first != 0 && of_handle != first)) {
      return absl::InvalidArgumentError(absl::StrCat("handles must be of one TableLookup, got some of lookup ", first,
                                                     " and some of lookup ", of_handle, "."));
    }
    first = of_handle;
  }
  *clock = first;
  if (first == 0 || !table.IsStale(first)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rows of training lookup ", first, " have been evicted, removed or moved by a later one before their gradients ",
      "came: updating them now would change other rows. Nothing was updated. Take gradients before the next training ",
      "lookup, and pass training=False to lookups that are not trained."));
}

// Reads the learning rate and the number of the update from the inputs at `index` and behind it.
static absl::Status ReadStep(OpKernelContext* ctx, int index, StepInput* step) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, index, "learning_rate", &step->learning_rate));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, index + 1, "step", &step->step));
  if (!(step->learning_rate >= 0.0f) || std::isinf(step->learning_rate)) {
    return absl::InvalidArgumentError(absl::StrCat("learning_rate must be finite and >= 0, got ", step->learning_rate,
                                                   ". A schedule may have left its range."));
  }
  if (step->step >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("step must be >= 1, the number of this update, got ", step->step, "."));
}

template <typename T>
class TableApplyGradientsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    StepInput step;
    uint32_t clock;
    TF_RETURN_IF_ERROR(CheckGradients(ctx, *table, &clock));
    TF_RETURN_IF_ERROR(ReadStep(ctx, 5, &step));
    table->Apply(In<int64_t>(ctx->input(1)), In<int32_t>(ctx->input(2)), ctx->input(3).data(), StorageFor<T>(),
                 ctx->input(4).scalar<float>()(), step, CpuPool(ctx), clock);
    return absl::OkStatus();
  }
};

template <typename T>
class TableAccumulateGradientsOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    uint32_t clock;
    TF_RETURN_IF_ERROR(CheckGradients(ctx, *table, &clock));
    return table->Accumulate(In<int64_t>(ctx->input(1)), In<int32_t>(ctx->input(2)), ctx->input(3).data(),
                             StorageFor<T>(), ctx->input(4).scalar<float>()(), CpuPool(ctx), clock);
  }
};

class TableApplyAccumulatedOp : public TableKernel {
 public:
  using TableKernel::TableKernel;

 protected:
  absl::Status Run(OpKernelContext* ctx, HashTable* table) override {
    StepInput step;
    TF_RETURN_IF_ERROR(ReadStep(ctx, 1, &step));
    table->ApplyAccumulated(step, CpuPool(ctx));
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("Fusedrec>HashTable").Device(DEVICE_CPU), HashTableOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TablePrefetch").Device(DEVICE_CPU), TablePrefetchOp);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyAccumulated").Device(DEVICE_CPU), TableApplyAccumulatedOp);
#define FUSEDREC_REGISTER(T)                                                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableLookup").Device(DEVICE_CPU).TypeConstraint<T>("T"), TableLookupOp<T>); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableLookAhead").Device(DEVICE_CPU).TypeConstraint<T>("T"),                 \
                          TableLookAheadOp<T>);                                                                       \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableRefresh").Device(DEVICE_CPU).TypeConstraint<T>("T"),                   \
                          TableRefreshOp<T>);                                                                         \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableFind").Device(DEVICE_CPU).TypeConstraint<T>("T"), TableFindOp<T>);     \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyGradients").Device(DEVICE_CPU).TypeConstraint<T>("T"),            \
                          TableApplyGradientsOp<T>);                                                                  \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableAccumulateGradients").Device(DEVICE_CPU).TypeConstraint<T>("T"),       \
                          TableAccumulateGradientsOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
