// Kernels of the training step: the resource itself, lookups, and updates.

#include "common/bucket.h"
#include "hash_table/cpu/hash_table.h"
#include "hash_table/cuda/device_table.h"
#include "hash_table/kernels/table_kernel.h"
#include "recovery/recovery.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace fusedrec {
namespace {

template <On kOn>
class HashTableOp : public tensorflow::ResourceOpKernel<TableResource> {
 public:
  explicit HashTableOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    std::vector<std::string> texts;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &texts));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &anonymous_));
    // On a GPU, tier.host_rows decides which of its places it is.
    const std::string refused = ReadTables(texts, kOn == On::kGpu ? kOnDevice : kOnCpu, &spec_);
    OP_REQUIRES(ctx, refused.empty(), Invalid(refused));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::mutex_lock lock(context_mutex_);
    context_ = ctx;
    if (anonymous_) {
      OP_REQUIRES_OK(ctx, MakeAnonymous());
    } else {
      ResourceOpKernel::Compute(ctx);
    }
    context_ = nullptr;
  }

 private:
  // A handle that alone keeps the table.
  absl::Status MakeAnonymous() {
    TableResource* resource = nullptr;
    FUSEDREC_TRY(CreateResource(&resource));
    const auto handle = tensorflow::ResourceHandle::MakeRefCountingHandle(resource, context_->device()->name());
    Tensor* out;
    FUSEDREC_TRY(context_->allocate_output(0, TensorShape({}), &out));
    out->scalar<tensorflow::ResourceHandle>()() = handle;
    return absl::OkStatus();
  }

  absl::Status CreateResource(TableResource** resource) override {
    std::unique_ptr<Table> table;
    if constexpr (kOn == On::kGpu) {
      tensorflow::Allocator* memory = context_->device()->GetAllocator(tensorflow::AllocatorAttributes());
      FUSEDREC_TRY(MakeDeviceTable(spec_, {memory, &Allocate, &Release}, StreamOf(context_), &table));
    } else {
      FUSEDREC_TRY(OpenTable<HashTable>(spec_, &table));
    }
    *resource = new TableResource(std::move(table));
    return absl::OkStatus();
  }

  // Does not wait for memory that others may give back, so the table fails at once.
  static void* Allocate(void* memory, int64_t bytes) {
    const tensorflow::AllocationAttributes at_once(false, false, nullptr);
    return static_cast<tensorflow::Allocator*>(memory)->AllocateRaw(256, bytes, at_once);
  }
  static void Release(void* memory, void* data) { static_cast<tensorflow::Allocator*>(memory)->DeallocateRaw(data); }

  TableSpec spec_;
  bool anonymous_;
  tensorflow::mutex context_mutex_;
  OpKernelContext* context_ = nullptr;  // of the call under way
};

// A kernel that returns rows of type T. Its attribute `dim`, from which static shapes come, must be the table's.
template <On kOn, typename T>
class RowsOp : public TableKernel<kOn, Table::Access::kAsTheyAre> {
 public:
  explicit RowsOp(OpKernelConstruction* ctx) : TableKernel<kOn, Table::Access::kAsTheyAre>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    if (ctx->HasAttr("read_rows")) OP_REQUIRES_OK(ctx, ctx->GetAttr("read_rows", &reads_rows_));
    if (ctx->HasAttr("window")) OP_REQUIRES_OK(ctx, ctx->GetAttr("window", &window_));
    if (!ctx->HasAttr("N")) return;
    tensorflow::DataTypeVector types;
    int64_t count;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("A", &types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &count));
    OP_REQUIRES(ctx, static_cast<int64_t>(types.size()) == count && count <= 1,
        Invalid("rows_ahead, handles_ahead and mark must each have one tensor, of a TableLookAhead, or none, got ",
            types.size(), ", ", count, " and ", count, "."));
  }

 protected:
  absl::Status Start(OpKernelContext* ctx, const Table& table, bool on_host, Message* message) const {
    if (table.spec().storage == Storage::kInt8 && !std::is_same_v<T, float>) {
      return Invalid("T must be float for ", table.spec().NameOf(0), ", whose rows are in int8, got ",
          tensorflow::DataTypeString(tensorflow::DataTypeToEnum<T>::value), ".");
    }
    if (dim_ == table.spec().dim) return ReadMessage(ctx, table, on_host, message);
    return Invalid("dim must be that of the table, ", table.spec().dim, ", got ", dim_, ".");
  }

  // Allocates output 0, [size, dim]. Kernels on a device write the zeros after the rows themselves.
  absl::Status AllocateRows(OpKernelContext* ctx, const TableCall& call, int64_t num_ids, int64_t size,
                            RowsOut* rows) const {
    Tensor* out;
    FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({size, dim_}), &out));
    *rows = {out->data(), StorageFor<T>(), size};
    if (call.is_on_cpu() && size > 0) {
      T* const behind = out->flat<T>().data() + num_ids * dim_;
      std::memset(static_cast<void*>(behind), 0, (size - num_ids) * dim_ * sizeof(T));
    }
    return absl::OkStatus();
  }

  // Reads inputs 3 to 5, a look-ahead, and gives its rows on as output 0 where they are. *given is null without one.
  absl::Status ReadAhead(OpKernelContext* ctx, const TableCall& call, int64_t num_ids, Ahead* ahead, const Ahead** given,
                         RowsOut* rows) const {
    *given = nullptr;
    OpInputList marks;
    FUSEDREC_TRY(ctx->input_list("mark", &marks));
    if (marks.size() == 0) return AllocateRows(ctx, call, num_ids, BucketedSize(num_ids), rows);
    const Tensor &rows_ahead = ctx->input(3), &handles = ctx->input(4), &mark = ctx->input(5);
    FUSEDREC_TRY(RequireRank("rows_ahead", rows_ahead, 2));
    FUSEDREC_TRY(RequireRank("handles_ahead", handles, 1));
    const bool has_rows = rows_ahead.dtype() == tensorflow::DataTypeToEnum<T>::value && handles.NumElements() == num_ids &&
                          rows_ahead.dim_size(0) >= num_ids && rows_ahead.dim_size(1) == dim_;
    if (mark.shape() != TensorShape({3}) || (call.is_on_cpu() && !has_rows)) {
      return Invalid("rows_ahead, handles_ahead and mark must be of a TableLookAhead of the same ", num_ids,
          " ids, got shapes ", rows_ahead.shape().DebugString(), ", ", handles.shape().DebugString(), " and ",
          mark.shape().DebugString(), ", with rows of ", tensorflow::DataTypeString(rows_ahead.dtype()), ".");
    }
    const auto state = mark.flat<int64_t>();
    *ahead = {In<int64_t>(handles), state(0), state(1), static_cast<uint64_t>(state(2))};
    *given = ahead;
    if (!call.is_on_cpu()) return AllocateRows(ctx, call, num_ids, BucketedSize(num_ids), rows);
    Tensor* out;
    FUSEDREC_TRY(ctx->forward_input_or_allocate_output({3}, 0, rows_ahead.shape(), &out));
    if (out->data() != rows_ahead.data()) std::memcpy(out->data(), rows_ahead.data(), rows_ahead.TotalBytes());
    *rows = {out->data(), StorageFor<T>(), out->dim_size(0)};
    return absl::OkStatus();
  }

  int64_t dim() const { return dim_; }

  bool reads_rows_ = true;  // of TableLookup
  int64_t window_ = 0;      // of TableLookup and TableRead

 private:
  int64_t dim_;
};

// Reads the inputs sum_index and sum_splits of sums of `num_ids` received ids.
absl::Status ReadRowSums(OpKernelContext* ctx, const TableCall& call, int64_t num_ids, RowSums* sums) {
  OpInputList index, splits;
  FUSEDREC_TRY(ctx->input_list("sum_index", &index));
  FUSEDREC_TRY(ctx->input_list("sum_splits", &splits));
  if (index.size() == 0 || index[0].NumElements() == 0) return absl::OkStatus();
  FUSEDREC_TRY(RequireRank("sum_index", index[0], 1));
  FUSEDREC_TRY(RequireRank("sum_splits", splits[0], 1));
  *sums = {In<int32_t>(index[0]), In<int64_t>(splits[0])};
  FUSEDREC_TRY(RequireSplits("sum_splits", sums->splits, sums->index.size()));
  const int64_t wrong = FirstOutOfRange(sums->index, num_ids);
  if (wrong < 0 && index.size() == 1 && call.is_on_cpu()) return absl::OkStatus();
  if (wrong < 0) return Invalid("sum_index must be of one lookup, on a CPU, got ", index.size(), " tensors.");
  return Invalid("sum_index must lie in [0, ", num_ids, "), the received ids, got ", sums->index[wrong],
      ". Pass the results of partial_sum_terms.");
}

template <On kOn, typename T>
struct TableLookupOp : RowsOp<kOn, T> {
  using RowsOp<kOn, T>::RowsOp;

  // On a GPU it waits, for the number of distinct rows.
  absl::Status Run(OpKernelContext* ctx, Table* table, const TableCall& call) override {
    Message message;
    RowsOut rows;
    Ahead ahead;
    const Ahead* given = nullptr;
    RowSums sums;
    std::vector<const float*> places;  // of distinct rows
    Tensor read;
    FUSEDREC_TRY(this->Start(ctx, *table, call.is_on_cpu(), &message));
    FUSEDREC_TRY(ReadRowSums(ctx, call, message.num_ids, &sums));
    const bool in_place = std::is_same_v<T, float> && table->FloatsOf({}, &places);
    if (!sums.index.empty()) {
      rows = {nullptr, StorageFor<T>(), 0};
      if (!in_place) {
        const TensorShape shape({message.num_ids, table->spec().dim});
        FUSEDREC_TRY(ctx->allocate_temp(tensorflow::DataTypeToEnum<T>::value, shape, &read));
        rows = {read.data(), StorageFor<T>(), message.num_ids};
      }
    } else if (this->reads_rows_) {
      FUSEDREC_TRY(this->ReadAhead(ctx, call, message.num_ids, &ahead, &given, &rows));
    } else {
      FUSEDREC_TRY(this->AllocateRows(ctx, call, 0, 0, &rows));
      rows.data = nullptr;
    }
    Tensor* inverse;
    Tensor handles;
    int64_t num_rows;
    FUSEDREC_TRY(ctx->allocate_output(2, TensorShape({message.num_ids}), &inverse));
    FUSEDREC_TRY(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({message.num_ids}), &handles));
    FUSEDREC_TRY(table->Lookup(call, message, this->window_, given, rows, Out<int32_t>(inverse).data(),
                               Out<int64_t>(&handles).data(), &num_rows));
    ctx->set_output(1, handles.Slice(0, num_rows));
    if (sums.index.empty()) return absl::OkStatus();
    if (in_place) table->FloatsOf(In<int64_t>(handles).subspan(0, num_rows), &places);
    return Sum(ctx, call, sums, places, In<int32_t>(*inverse), read);
  }

 private:
  // Returns sums of rows where they are or, without places, of those that were read.
  absl::Status Sum(OpKernelContext* ctx, const TableCall& call, const RowSums& sums,
                   absl::Span<const float* const> places, absl::Span<const int32_t> inverse, const Tensor& read) const {
    const int64_t dim = this->dim(), num_sums = sums.splits.size() - 1;
    const std::vector<float> ones(num_sums, 1.0f);
    Tensor* out;
    FUSEDREC_TRY(ctx->allocate_output(0, TensorShape({num_sums, dim}), &out));
    T* const numbers = out->flat<T>().data();
    if (places.empty()) {
      PooledRecover(read.flat<T>().data(), dim, sums.index, sums.splits, ones, call.parallel_for, numbers);
    } else if constexpr (std::is_same_v<T, float>) {
      std::vector<const float*> rows;
      rows.reserve(sums.index.size());
      for (const int32_t id : sums.index) rows.push_back(places[inverse[id]]);
      PooledRecoverParts<float>(rows, dim, sums.splits, ones, call.parallel_for, numbers, num_sums);
    }
    return absl::OkStatus();
  }
};

// The message is in host memory, so that nothing on a GPU waits for kernels of other work (docs/gpu.md, "Streams").
// Tables on a device return no rows: they read nothing ahead, or have the rows in buffers of their own.
template <On kOn, typename T>
struct TableLookAheadOp : RowsOp<kOn, T> {
  using RowsOp<kOn, T>::RowsOp;

  absl::Status Run(OpKernelContext* ctx, Table* table, const TableCall& call) override {
    Message message;
    RowsOut rows;
    Tensor *handles, *mark;
    Ahead ahead{};
    FUSEDREC_TRY(this->Start(ctx, *table, true, &message));
    const int64_t num_ids = call.is_on_cpu() ? message.num_ids : 0;
    FUSEDREC_TRY(this->AllocateRows(ctx, call, num_ids, call.is_on_cpu() ? BucketedSize(num_ids) : 0, &rows));
    FUSEDREC_TRY(ctx->allocate_output(1, TensorShape({num_ids}), &handles));
    FUSEDREC_TRY(ctx->allocate_output(2, TensorShape({3}), &mark));
    FUSEDREC_TRY(table->LookAhead(call, message, rows, Out<int64_t>(handles), &ahead));
    const int64_t state[] = {ahead.version, ahead.moves, static_cast<int64_t>(ahead.fingerprint)};
    std::copy_n(state, 3, Out<int64_t>(mark).begin());
    return absl::OkStatus();
  }
};

template <On kOn, typename T>
struct TableReadOp : RowsOp<kOn, T> {
  using RowsOp<kOn, T>::RowsOp;

  absl::Status Run(OpKernelContext* ctx, Table* table, const TableCall& call) override {
    Message message;
    RowsOut rows;
    Ahead ahead;
    const Ahead* given;
    FUSEDREC_TRY(this->Start(ctx, *table, call.is_on_cpu(), &message));
    FUSEDREC_TRY(this->ReadAhead(ctx, call, message.num_ids, &ahead, &given, &rows));
    return table->Read(call, message, this->window_, given, rows);
  }
};

absl::Status Prefetch(OpKernelContext* ctx, Table* table, const TableCall& call) {
  Message message;
  FUSEDREC_TRY(ReadMessage(ctx, *table, true, &message));
  return table->Prefetch(call, message);
}

template <typename T>
absl::Status ReadGradients(OpKernelContext* ctx, const Table& table, const TableCall& call, Gradients* read) {
  const Tensor &handles = ctx->input(1), &inverse = ctx->input(2), &grads = ctx->input(3);
  FUSEDREC_TRY(RequireRank("handles", handles, 1));
  FUSEDREC_TRY(RequireRank("inverse", inverse, 1));
  FUSEDREC_TRY(RequireRank("grads", grads, 2));
  FUSEDREC_TRY(RequireSize("the size of handles", handles.NumElements()));
  FUSEDREC_TRY(RequireSize("the size of inverse", inverse.NumElements()));
  RowSums sums;
  FUSEDREC_TRY(ReadRowSums(ctx, call, inverse.NumElements(), &sums));
  const int64_t size = sums.index.empty() ? inverse.NumElements() : sums.splits.size() - 1;
  if (grads.dim_size(0) < size || grads.dim_size(1) != table.spec().dim) {
    return Invalid("grads must have shape [>= ", size, ", ", table.spec().dim,
        "], one row for each received id or sum, got ", grads.shape().DebugString(), ".");
  }
  *read = {In<int64_t>(handles), In<int32_t>(inverse), grads.data(), StorageFor<T>(), 0.0f, sums};
  return ScalarInput(ctx, 4, "scale", &read->scale);
}

absl::Status ReadComing(OpKernelContext* ctx, const TableCall& call, Gradients* read) {
  FUSEDREC_TRY(ScalarInput(ctx, 7, "begin", &read->begin));
  OpInputList coming;
  FUSEDREC_TRY(ReadVectors(ctx, "coming", &coming));
  if (!call.is_on_cpu() && (coming.size() > 0 || !read->begin)) {
    return Invalid("coming must be empty and begin True on a GPU, got ", coming.size(), " and ", read->begin,
        ". Use table_accumulate_gradients for gradients in several parts.");
  }
  for (int i = 0; i < coming.size(); ++i) {
    read->coming.push_back(In<int32_t>(coming[i]));
    const int64_t rows = read->handles.size(), wrong = FirstOutOfRange(read->coming[i], rows);
    if (wrong < 0) continue;
    return Invalid("coming[", i, "] must lie in [0, ", rows, "), got ", read->coming[i][wrong],
        ". Take handles and all inverses from one TableLookup.");
  }
  return absl::OkStatus();
}

absl::Status ReadStep(OpKernelContext* ctx, int index, Step* step) {
  FUSEDREC_TRY(ScalarInput(ctx, index, "learning_rate", &step->learning_rate));
  FUSEDREC_TRY(ScalarInput(ctx, index + 1, "step", &step->number));
  if (!(step->learning_rate >= 0.0f) || std::isinf(step->learning_rate)) {
    return Invalid(
        "learning_rate must be finite and >= 0, got ", step->learning_rate, ". A schedule may have left its range.");
  }
  if (step->number >= 1) return absl::OkStatus();
  return Invalid("step must be >= 1, the number of this update, got ", step->number, ".");
}

template <typename T>
absl::Status ApplyGradients(OpKernelContext* ctx, Table* table, const TableCall& call) {
  Gradients grads;
  Step step;
  std::vector<int32_t> left_out;
  FUSEDREC_TRY(ReadGradients<T>(ctx, *table, call, &grads));
  FUSEDREC_TRY(ReadStep(ctx, 5, &step));
  FUSEDREC_TRY(ReadComing(ctx, call, &grads));
  FUSEDREC_TRY(table->Apply(call, grads, step, &left_out));
  return Give(ctx, 0, left_out);
}

template <typename T>
absl::Status AccumulateGradients(OpKernelContext* ctx, Table* table, const TableCall& call) {
  Gradients grads;
  bool begin;
  std::vector<int32_t> left_out;
  FUSEDREC_TRY(ReadGradients<T>(ctx, *table, call, &grads));
  FUSEDREC_TRY(ScalarInput(ctx, 5, "begin", &begin));
  FUSEDREC_TRY(table->Accumulate(call, grads, begin, &left_out));
  return Give(ctx, 0, left_out);
}

absl::Status ApplyAccumulated(OpKernelContext* ctx, Table* table, const TableCall& call) {
  Step step;
  FUSEDREC_TRY(ReadStep(ctx, 1, &step));
  return table->ApplyAccumulated(call, step);
}

template <On kOn, typename T>
using ApplyOp = TableFunctionKernel<kOn, Table::Access::kAsTheyAre, &ApplyGradients<T>>;
template <On kOn, typename T>
using AccumulateOp = TableFunctionKernel<kOn, Table::Access::kAsTheyAre, &AccumulateGradients<T>>;

#define FUSEDREC_HOST_MESSAGE .HostMemory("table").HostMemory("message").HostMemory("received_splits")
FUSEDREC_KERNEL_ON_BOTH("HashTable", HashTableOp, .HostMemory("table"));
#define FUSEDREC_HOST_SUMS .HostMemory("sum_index").HostMemory("sum_splits")
FUSEDREC_KERNEL_OF_ROWS("TableLookup", TableLookupOp,
    .HostMemory("table").HostMemory("received_splits").HostMemory("mark") FUSEDREC_HOST_SUMS);
FUSEDREC_KERNEL_OF_ROWS("TableLookAhead", TableLookAheadOp, FUSEDREC_HOST_MESSAGE.HostMemory("mark"));
FUSEDREC_KERNEL_OF_ROWS("TableRead", TableReadOp, .HostMemory("table").HostMemory("received_splits").HostMemory("mark"));
FUSEDREC_TABLE_KERNEL(Prefetch, kAsTheyAre, .HostMemory("message").HostMemory("received_splits"));
FUSEDREC_KERNEL_OF_ROWS("TableApplyGradients", ApplyOp,
    .HostMemory("table").HostMemory("scale").HostMemory("learning_rate").HostMemory("step").HostMemory("begin")
    .HostMemory("left_out") FUSEDREC_HOST_SUMS);
FUSEDREC_KERNEL_OF_ROWS("TableAccumulateGradients", AccumulateOp,
    .HostMemory("table").HostMemory("scale").HostMemory("begin").HostMemory("left_out") FUSEDREC_HOST_SUMS);
#undef FUSEDREC_HOST_SUMS
FUSEDREC_TABLE_KERNEL(ApplyAccumulated, kAsTheyAre, .HostMemory("learning_rate").HostMemory("step"));
#undef FUSEDREC_HOST_MESSAGE

}  // namespace
}  // namespace fusedrec
