// Kernels of replicas that train apart and are averaged from time to time.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bucket.h"
#include "hash_table/kernels/table_resource.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;

namespace {

absl::Status NoteTrained(OpKernelContext* ctx, HashTable* table) {
  Message message;
  TF_RETURN_IF_ERROR(RequireAveraged(table->spec()));
  TF_RETURN_IF_ERROR(ReadMessage(ctx, *table, &message));
  table->replicas().NoteTrained(message);
  return absl::OkStatus();
}

absl::Status TakeUnsynced(OpKernelContext* ctx, HashTable* table) {
  std::vector<int64_t> message, ids, headers;
  Tensor *message_out, *headers_out;
  TF_RETURN_IF_ERROR(RequireAveraged(table->spec()));
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
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, table->segments(), 1, "ids"));
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
  TF_RETURN_IF_ERROR(RequireAveraged(table->spec()));
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, table->segments(), 1, "left"));
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, table->segments(), 3, "ids"));
  TF_RETURN_IF_ERROR(RequireNumbers(ids, numbers, headers, table->format(0).numbers()));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 7, "step", &step));
  const absl::Span<const int64_t> splits = In<int64_t>(ctx->input(4));
  for (int64_t s = 0; s < table->segments(); ++s) {
    const absl::Span<const int64_t> of_segment = In<int64_t>(ids).subspan(splits[s], splits[s + 1] - splits[s]);
    TF_RETURN_IF_ERROR(RequireDistinct("ids", of_segment, "one row of each id."));
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
