// Kernels of replicas that are averaged, for tables with all rows on a device.
#include "common/bucket.h"
#include "hash_table/cuda/kernels/device_table_resource.h"
#include "hash_table/kernels/table_checks.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;

namespace {

absl::Status NoteTrained(OpKernelContext* ctx, const DeviceTableResource& resource) {
  MessageInput in;
  TF_RETURN_IF_ERROR(RequireAveraged(resource.spec()));
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  return resource.StatusOf(fusedrec_table_note_trained(resource.table(), &in.message, StreamOf(ctx)), "a message");
}

// Outputs 0 and 1.
int AllocateUnsynced(void* context, int64_t entries, int64_t ids, int64_t** message, int64_t** headers) {
  auto* const ctx = static_cast<OpKernelContext*>(context);
  Tensor *message_out, *headers_out;
  if (!ctx->allocate_output(0, TensorShape({entries}), &message_out).ok()) return 1;
  if (!ctx->allocate_output(1, TensorShape({ids}), &headers_out).ok()) return 1;
  *message = Out<int64_t>(message_out).data();
  *headers = Out<int64_t>(headers_out).data();
  return 0;
}

absl::Status TakeUnsynced(OpKernelContext* ctx, const DeviceTableResource& resource) {
  TF_RETURN_IF_ERROR(RequireAveraged(resource.spec()));
  const FusedrecUnsyncedSink sink{ctx, &AllocateUnsynced};
  return resource.StatusOf(fusedrec_table_take_unsynced(resource.table(), &sink, StreamOf(ctx)), "a list of rows");
}

absl::Status ReadNumbers(OpKernelContext* ctx, const DeviceTableResource& resource) {
  if (resource.host_rows() != nullptr) return RequireAveraged(resource.spec());
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, resource.segments(), 1, "ids"));
  const Tensor &ids = ctx->input(1), &splits = ctx->input(2);
  const int64_t rows = BucketedSize(ids.NumElements());
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({rows, fusedrec_table_width(resource.table())}), &out));
  return resource.StatusOf(
      fusedrec_table_read_numbers(resource.table(), In<int64_t>(ids).data(), In<int64_t>(splits).data(),
                                  Out<float>(out).data(), rows, StreamOf(ctx)),
      "a list of rows");
}

absl::Status Merge(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecMerge in;
  const Tensor &ids = ctx->input(3), &numbers = ctx->input(5), &headers = ctx->input(6);
  TF_RETURN_IF_ERROR(RequireAveraged(resource.spec()));
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, resource.segments(), 1, "left"));
  TF_RETURN_IF_ERROR(RequireGroupedIds(ctx, resource.segments(), 3, "ids"));
  TF_RETURN_IF_ERROR(RequireNumbers(ids, numbers, headers, fusedrec_table_width(resource.table())));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 7, "step", &in.step));
  in.left = In<int64_t>(ctx->input(1)).data();
  in.left_splits = In<int64_t>(ctx->input(2)).data();
  in.ids = In<int64_t>(ids).data();
  in.id_splits = In<int64_t>(ctx->input(4)).data();
  in.numbers = In<float>(numbers).data();
  in.headers = In<int64_t>(headers).data();
  const int answer = fusedrec_table_merge(resource.table(), &in, StreamOf(ctx));
  if (answer != kDeviceTableFull) return resource.StatusOf(answer, "the rows of all replicas");
  const TableSpec& spec = resource.spec();
  const int64_t full = fusedrec_table_full_segment(resource.table());
  return absl::ResourceExhaustedError(absl::StrCat(
      "max_rows of ", spec.NameOf(full), " is ", spec.limits[full].max_rows, ", but its replicas have more rows ",
      "together that may not leave. Remedy: a larger max_rows, an eviction policy, or a smaller sync_every."));
}

}  // namespace

#define FUSEDREC_TABLE_KERNEL(NAME) Name("Fusedrec>" NAME).Device(DEVICE_GPU).HostMemory("table")
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableNoteTrained").HostMemory("received_splits"),
                        DeviceTableFunctionOp<NoteTrained>);
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableTakeUnsynced"), DeviceTableFunctionOp<TakeUnsynced>);
REGISTER_KERNEL_BUILDER(FUSEDREC_TABLE_KERNEL("TableReadNumbers").HostMemory("segment_splits"),
                        DeviceTableFunctionOp<ReadNumbers>);
REGISTER_KERNEL_BUILDER(
    FUSEDREC_TABLE_KERNEL("TableMerge").HostMemory("left_splits").HostMemory("segment_splits").HostMemory("step"),
    DeviceTableFunctionOp<Merge>);
#undef FUSEDREC_TABLE_KERNEL

}  // namespace fusedrec
