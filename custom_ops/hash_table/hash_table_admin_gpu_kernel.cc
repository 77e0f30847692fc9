// Kernels outside the training step for a table on a device: sizes, eviction, checkpoints; and what it refuses.
#include <algorithm>
#include <vector>

#include "hash_table/device_table_resource.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

absl::Status ReadSegment(OpKernelContext* ctx, const DeviceTableResource& resource, int64_t* segment) {
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 1, "segment", segment));
  return RequireSegment(*segment, resource.segments());
}

// What a table has; lists that it does not keep are empty.
absl::Status Give(OpKernelContext* ctx, int index, absl::Span<const int64_t> values, const TensorShape& shape) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(index, shape, &out));
  std::copy(values.begin(), values.end(), out->flat<int64_t>().data());
  return absl::OkStatus();
}
absl::Status GiveEmpty(OpKernelContext* ctx, int index) { return Give(ctx, index, {}, TensorShape({0})); }

absl::Status Size(OpKernelContext* ctx, const DeviceTableResource& resource) {
  std::vector<int64_t> sizes(resource.segments());
  int64_t about[4];
  fusedrec_table_size(resource.table(), sizes.data(), about);
  return Give(ctx, 0, sizes, TensorShape({resource.segments()}));
}

absl::Status Statistics(OpKernelContext* ctx, const DeviceTableResource& resource) {
  const int64_t segments = resource.segments();
  std::vector<int64_t> sizes(segments), counted(3 * segments), rows;
  int64_t about[4], all = 0;
  fusedrec_table_size(resource.table(), sizes.data(), about);
  fusedrec_table_statistics(resource.table(), counted.data());
  for (int64_t s = 0; s < segments; ++s) {
    all += sizes[s];
    rows.insert(rows.end(), {sizes[s], counted[3 * s], counted[3 * s + 1], counted[3 * s + 2], 0, 0});
  }
  TF_RETURN_IF_ERROR(Give(ctx, 0, rows, TensorShape({segments, 6})));
  return Give(ctx, 1, {about[2], about[3], 0, all, 0}, TensorShape({5}));
}

absl::Status Clock(OpKernelContext* ctx, const DeviceTableResource& resource) {
  std::vector<int64_t> sizes(resource.segments());
  int64_t about[4];
  fusedrec_table_size(resource.table(), sizes.data(), about);
  return Give(ctx, 0, {about[0], about[1]}, TensorShape({2}));
}

absl::Status SetClock(OpKernelContext* ctx, const DeviceTableResource& resource) {
  TF_RETURN_IF_ERROR(RequireClock(ctx->input(1)));
  const auto clock = ctx->input(1).flat<int64_t>();
  fusedrec_table_set_clock(resource.table(), clock(0), clock(1));
  return absl::OkStatus();
}

absl::Status Clear([[maybe_unused]] OpKernelContext* ctx, const DeviceTableResource& resource) {
  return resource.StatusOf(fusedrec_table_clear(resource.table(), StreamOf(ctx)), "its segments");
}

absl::Status Keys(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, since, count;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "since", &since));
  if (since < 0) return absl::InvalidArgumentError(absl::StrCat("since must be >= 0, got ", since, "."));
  std::vector<int64_t> sizes(resource.segments());
  int64_t about[4];
  fusedrec_table_size(resource.table(), sizes.data(), about);
  Tensor ids, handles;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({sizes[segment]}), &ids));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({sizes[segment]}), &handles));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_keys(resource.table(), segment, since, Out<int64_t>(&ids).data(), Out<int64_t>(&handles).data(),
                          &count, StreamOf(ctx)),
      "a list of keys"));
  ctx->set_output(0, ids.Slice(0, count));
  ctx->set_output(1, handles.Slice(0, count));
  return absl::OkStatus();
}

absl::Status ReadRecords(OpKernelContext* ctx, const DeviceTableResource& resource) {
  const Tensor& handles = ctx->input(1);
  Tensor* records;
  TF_RETURN_IF_ERROR(RequireRank("handles", handles, 1));
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      0, TensorShape({handles.NumElements(), fusedrec_table_record_bytes(resource.table())}), &records));
  return resource.StatusOf(
      fusedrec_table_read_records(resource.table(), In<int64_t>(handles).data(), handles.NumElements(),
                                  static_cast<char*>(records->data()), StreamOf(ctx)),
      "an export");
}

absl::Status Import(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  const Tensor &ids = ctx->input(2), &records = ctx->input(3);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(RequireRecords(ids, records, fusedrec_table_record_bytes(resource.table())));
  return resource.StatusOf(
      fusedrec_table_write_records(resource.table(), segment, In<int64_t>(ids).data(), ids.NumElements(),
                                   static_cast<const char*>(records.data()), StreamOf(ctx)),
      "rows that are imported");
}

absl::Status Remove(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, gone;
  const Tensor& ids = ctx->input(2);
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(RequireRank("ids", ids, 1));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_remove(resource.table(), segment, In<int64_t>(ids).data(), ids.NumElements(), &gone,
                            StreamOf(ctx)),
      "a removal"));
  return Give(ctx, 0, {gone}, TensorShape({}));
}

absl::Status Evict(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment, count, gone;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 2, "count", &count));
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("count must be >= 0, got ", count, "."));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_evict(resource.table(), segment, count, &gone, StreamOf(ctx)), "an eviction"));
  return Give(ctx, 0, {gone}, TensorShape({}));
}

// A table on a device is made without admission and without tombstones (RequireDeviceForm): both lists stay empty.
absl::Status Tombstones(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  TF_RETURN_IF_ERROR(ReadSegment(ctx, resource, &segment));
  return GiveEmpty(ctx, 0);
}
absl::Status ForgetTombstones(OpKernelContext*, const DeviceTableResource&) { return absl::OkStatus(); }
absl::Status Candidates(OpKernelContext* ctx, const DeviceTableResource& resource) {
  TF_RETURN_IF_ERROR(Tombstones(ctx, resource));
  return GiveEmpty(ctx, 1);
}
absl::Status ImportCandidates(OpKernelContext* ctx, const DeviceTableResource& resource) {
  int64_t segment;
  return ReadSegment(ctx, resource, &segment);
}

// What has no form on a device.
class RefusedOnDeviceOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    ctx->SetStatus(absl::UnimplementedError(absl::StrCat(
        type_string(), " is not for tables on a GPU, which neither accumulate gradients nor are averaged. Remedy: make ",
        "the table under tf.device('/CPU:0'), or train it with accumulate_steps=1, one training lookup per step and ",
        "Topology(rule='gradient_sync').")));
  }
};

}  // namespace

#define FUSEDREC_KERNEL(NAME) Name("Fusedrec>" NAME).Device(DEVICE_GPU).HostMemory("table")
#define FUSEDREC_OF_SEGMENT(NAME) FUSEDREC_KERNEL(NAME).HostMemory("segment")
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableSize").HostMemory("size"), DeviceTableFunctionOp<Size>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableStatistics").HostMemory("segments").HostMemory("bytes"),
                        DeviceTableFunctionOp<Statistics>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableClock").HostMemory("clock"), DeviceTableFunctionOp<Clock>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableSetClock").HostMemory("clock"), DeviceTableFunctionOp<SetClock>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableClear"), DeviceTableFunctionOp<Clear>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableKeys").HostMemory("since"), DeviceTableFunctionOp<Keys>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableReadRecords"), DeviceTableFunctionOp<ReadRecords>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableImport"), DeviceTableFunctionOp<Import>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableRemove").HostMemory("removed"), DeviceTableFunctionOp<Remove>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableEvict").HostMemory("count").HostMemory("evicted"),
                        DeviceTableFunctionOp<Evict>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableTombstones").HostMemory("ids"), DeviceTableFunctionOp<Tombstones>);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableForgetTombstones"), DeviceTableFunctionOp<ForgetTombstones>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableCandidates").HostMemory("ids").HostMemory("counts"),
                        DeviceTableFunctionOp<Candidates>);
REGISTER_KERNEL_BUILDER(FUSEDREC_OF_SEGMENT("TableImportCandidates").HostMemory("ids").HostMemory("counts"),
                        DeviceTableFunctionOp<ImportCandidates>);
#define FUSEDREC_REGISTER(T) \
  REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableAccumulateGradients").TypeConstraint<T>("T"), RefusedOnDeviceOp);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableApplyAccumulated"), RefusedOnDeviceOp);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableNoteTrained").HostMemory("received_splits"), RefusedOnDeviceOp);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableTakeUnsynced"), RefusedOnDeviceOp);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableReadNumbers").HostMemory("segment_splits"), RefusedOnDeviceOp);
REGISTER_KERNEL_BUILDER(FUSEDREC_KERNEL("TableMerge").HostMemory("segment_splits"), RefusedOnDeviceOp);
#undef FUSEDREC_OF_SEGMENT
#undef FUSEDREC_KERNEL

}  // namespace fusedrec
