// Kernels of replicas that train apart and are averaged from time to time.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bucket.h"
#include "hash_table/kernels/table_resource.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

absl::Status RequireAveraged(const HashTable& table) {
  if (table.spec().averaged) return absl::OkStatus();
  return absl::FailedPreconditionError("this table was not made with averaged=True, so it does not know what changes.");
}

// Checks the ids of all segments and their bounds, inputs `index` and `index + 1`.
absl::Status CheckIds(OpKernelContext* ctx, const HashTable& table, int index, const char* name) {
  const Tensor &ids = ctx->input(index), &splits = ctx->input(index + 1);
  TF_RETURN_IF_ERROR(RequireRank(name, ids, 1));
  TF_RETURN_IF_ERROR(RequireRank("segment_splits", splits, 1));
  const absl::Span<const int64_t> bounds = In<int64_t>(splits);
  if (static_cast<int64_t>(bounds.size()) == table.segments() + 1 && bounds.front() == 0 &&
      bounds.back() == ids.NumElements() && std::is_sorted(bounds.begin(), bounds.end())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("segment_splits of ", name, " must be ", table.segments() + 1,
                                                 " numbers from 0 to ", ids.NumElements(), " that do not decrease."));
}

absl::Status NoteTrained(OpKernelContext* ctx, HashTable* table) {
  Message message;
  TF_RETURN_IF_ERROR(RequireAveraged(*table));
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  table->replicas().NoteTrained(message);
  return absl::OkStatus();
}

absl::Status TakeUnsynced(OpKernelContext* ctx, HashTable* table) {
  std::vector<int64_t> message, ids, headers;
  Tensor *message_out, *headers_out;
  TF_RETURN_IF_ERROR(RequireAveraged(*table));
  table->replicas().TakeUnsynced(&message, &ids, &headers);
  message.insert(message.end(), ids.begin(), ids.end());
  const int64_t entries = message.size(), n = headers.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({entries}), &message_out));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n}), &headers_out));
  std::copy(message.begin(), message.end(), message_out->flat<int64_t>().data());
  std::copy(headers.begin(), headers.end(), headers_out->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status ReadNumbers(OpKernelContext* ctx, HashTable* table) {
  TF_RETURN_IF_ERROR(CheckIds(ctx, *table, 1, "ids"));
  const int64_t n = ctx->input(1).NumElements(), width = table->format(0).numbers(), padded = BucketedSize(n);
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({padded, width}), &out));
  float* numbers = out->flat<float>().data();
  table->replicas().ReadNumbers(In<int64_t>(ctx->input(1)), In<int64_t>(ctx->input(2)), CpuPool(ctx), numbers);
  std::memset(numbers + n * width, 0, (padded - n) * width * sizeof(float));
  return absl::OkStatus();
}

absl::Status Merge(OpKernelContext* ctx, HashTable* table) {
  int64_t step;
  const Tensor &ids = ctx->input(3), &numbers = ctx->input(5), &headers = ctx->input(6);
  TF_RETURN_IF_ERROR(RequireAveraged(*table));
  TF_RETURN_IF_ERROR(CheckIds(ctx, *table, 1, "left"));
  TF_RETURN_IF_ERROR(CheckIds(ctx, *table, 3, "ids"));
  TF_RETURN_IF_ERROR(RequireRank("numbers", numbers, 2));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 7, "step", &step));
  if (numbers.dim_size(0) < ids.NumElements() || numbers.dim_size(1) != table->format(0).numbers() ||
      headers.shape() != ids.shape()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "numbers must have shape [>= ", ids.NumElements(), ", ", table->format(0).numbers(), "] and headers [",
        ids.NumElements(), "], got ", numbers.shape().DebugString(), " and ", headers.shape().DebugString(), "."));
  }
  return table->replicas().Merge(In<int64_t>(ctx->input(1)), In<int64_t>(ctx->input(2)), In<int64_t>(ids),
                                 In<int64_t>(ctx->input(4)), numbers.flat<float>().data(), In<int64_t>(headers),
                                 static_cast<uint32_t>(step));
}

}  // namespace

REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableNoteTrained").Device(DEVICE_CPU), TableFunctionOp<NoteTrained>);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableTakeUnsynced").Device(DEVICE_CPU), TableFunctionOp<TakeUnsynced>);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableReadNumbers").Device(DEVICE_CPU), TableFunctionOp<ReadNumbers>);
REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableMerge").Device(DEVICE_CPU), TableFunctionOp<Merge>);

}  // namespace fusedrec
