// Kernels of updates for a table on a device: gradients in, rows trained.
#include <algorithm>

#include "hash_table/cuda/kernels/device_table_resource.h"
#include "hash_table/kernels/table_checks.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;

namespace {

// Checks inputs 1 to 4 of an update.
absl::Status ReadGradients(OpKernelContext* ctx, const DeviceTableResource& resource, Storage storage,
                           DeviceGradients* read) {
  const Tensor &handles = ctx->input(1), &inverse = ctx->input(2), &grads = ctx->input(3);
  TF_RETURN_IF_ERROR(CheckGradientShapes(ctx, resource.spec().dim));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 4, "scale", &read->scale));
  TF_RETURN_IF_ERROR(RequireSize("the size of handles", handles.NumElements()));
  TF_RETURN_IF_ERROR(RequireSize("the size of inverse", inverse.NumElements()));
  read->handles = In<int64_t>(handles).data();
  read->num_rows = handles.NumElements();
  read->inverse = In<int32_t>(inverse).data();
  read->num_ids = inverse.NumElements();
  read->grads = grads.data();
  read->storage = static_cast<int64_t>(storage);
  return absl::OkStatus();
}

// Calls update(left_out, num_left_out), and gives the places of the rows that it leaves out, ascending.
template <typename Update>
absl::Status GiveLeftOut(OpKernelContext* ctx, int64_t num_rows, const Update& update) {
  Tensor on_device;
  Tensor* left_out;
  int64_t num_left_out = 0;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({num_rows}), &on_device));
  int32_t* const places = Out<int32_t>(&on_device).data();
  TF_RETURN_IF_ERROR(update(places, &num_left_out));
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({num_left_out}), &left_out));
  if (num_left_out == 0) return absl::OkStatus();  // a copy would wait
  const absl::Span<int32_t> ascending = Out<int32_t>(left_out);
  TF_RETURN_IF_ERROR(CudaStatus(
      "copy_to_host", fusedrec_copy_to_host(ascending.data(), places, ascending.size() * sizeof(int32_t), StreamOf(ctx))));
  std::sort(ascending.begin(), ascending.end());
  return absl::OkStatus();
}

template <typename T>
absl::Status ApplyGradients(OpKernelContext* ctx, const DeviceTableResource& resource) {
  DeviceGradients in;
  Step step;
  TF_RETURN_IF_ERROR(ReadGradients(ctx, resource, StorageFor<T>(), &in));
  TF_RETURN_IF_ERROR(ReadStep(ctx, 5, &step));
  return GiveLeftOut(ctx, in.num_rows, [&](int32_t* places, int64_t* count) {
    if (resource.host_rows() != nullptr) return resource.host_rows()->Apply(in, step, places, count, StreamOf(ctx));
    return resource.StatusOf(
        fusedrec_table_apply(resource.table(), in.handles, in.num_rows, in.inverse, in.num_ids, in.grads, in.storage,
                             in.scale, &step, places, count, StreamOf(ctx)),
        "an update");
  });
}

template <typename T>
absl::Status AccumulateGradients(OpKernelContext* ctx, const DeviceTableResource& resource) {
  DeviceGradients in;
  bool begin;
  TF_RETURN_IF_ERROR(ReadGradients(ctx, resource, StorageFor<T>(), &in));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 5, "begin", &begin));
  return GiveLeftOut(ctx, in.num_rows, [&](int32_t* places, int64_t* count) {
    if (resource.host_rows() != nullptr) {
      return resource.host_rows()->Accumulate(in, begin, places, count, StreamOf(ctx));
    }
    return resource.StatusOf(
        fusedrec_table_accumulate(resource.table(), in.handles, in.num_rows, in.inverse, in.num_ids, in.grads,
                                  in.storage, in.scale, begin, places, count, StreamOf(ctx)),
        "the sums of gradients");
  });
}

absl::Status ApplyAccumulated(OpKernelContext* ctx, const DeviceTableResource& resource) {
  Step step;
  TF_RETURN_IF_ERROR(ReadStep(ctx, 1, &step));
  if (resource.host_rows() != nullptr) return resource.host_rows()->ApplyAccumulated(step, StreamOf(ctx));
  return resource.StatusOf(fusedrec_table_apply_accumulated(resource.table(), &step, StreamOf(ctx)), "an update");
}

}  // namespace

REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyAccumulated")
                            .Device(DEVICE_GPU)
                            .HostMemory("table")
                            .HostMemory("learning_rate")
                            .HostMemory("step"),
                        DeviceTableFunctionOp<ApplyAccumulated>);
#define FUSEDREC_REGISTER(T)                                     \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyGradients")   \
                              .Device(DEVICE_GPU)                \
                              .TypeConstraint<T>("T")            \
                              .HostMemory("table")               \
                              .HostMemory("scale")               \
                              .HostMemory("learning_rate")       \
                              .HostMemory("step")                \
                              .HostMemory("left_out"),           \
                          DeviceTableFunctionOp<ApplyGradients<T>>); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableAccumulateGradients") \
                              .Device(DEVICE_GPU)                \
                              .TypeConstraint<T>("T")            \
                              .HostMemory("table")               \
                              .HostMemory("scale")               \
                              .HostMemory("begin")               \
                              .HostMemory("left_out"),           \
                          DeviceTableFunctionOp<AccumulateGradients<T>>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
