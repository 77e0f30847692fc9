// Kernels of the training step for a table on a device. A launcher does the work; here is what TensorFlow asks for.
#include <string>

#include "common/bucket.h"
#include "hash_table/device_table_resource.h"
#include "hash_table/table_attributes.h"
#include "rank_partition/rank_partition.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class DeviceHashTableOp : public tensorflow::ResourceOpKernel<DeviceTableResource> {
 public:
  explicit DeviceHashTableOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadAttributes(ctx, &attributes_));
    OP_REQUIRES_OK(ctx, RequireDeviceForm(attributes_.spec));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::mutex_lock lock(context_mutex_);
    context_ = ctx;
    ResourceOpKernel::Compute(ctx);
    context_ = nullptr;
  }

 private:
  absl::Status CreateResource(DeviceTableResource** resource) override {
    auto optimizer = Optimizer::Make(attributes_.rule, attributes_.hyperparameters);
    if (!optimizer.ok()) return optimizer.status();
    return DeviceTableResource::Make(context_, attributes_.spec, *optimizer, resource);
  }

  TableAttributes attributes_;
  tensorflow::mutex context_mutex_;
  OpKernelContext* context_ = nullptr;  // of the call under way
};

namespace {

// Inputs 1 and 2.
absl::Status ReadMessage(OpKernelContext* ctx, const DeviceTableResource& resource, FusedrecMessage* message,
                         int64_t* num_ids) {
  const Tensor &entries = ctx->input(1), &splits = ctx->input(2);
  TF_RETURN_IF_ERROR(RequireRank("message", entries, 1));
  TF_RETURN_IF_ERROR(RequireRank("received_splits", splits, 1));
  TF_RETURN_IF_ERROR(RequireSize("the size of the message", entries.NumElements()));
  TF_RETURN_IF_ERROR(CheckReceivedSplits(entries.NumElements(), In<int32_t>(splits), resource.segments()));
  *message = {In<int64_t>(entries).data(), In<int32_t>(splits).data(), splits.NumElements()};
  *num_ids = entries.NumElements() - splits.NumElements() * resource.segments();
  return absl::OkStatus();
}

absl::Status AllocateRows(OpKernelContext* ctx, const DeviceTableResource& resource, int64_t num_ids, Tensor** rows) {
  return ctx->allocate_output(0, TensorShape({BucketedSize(num_ids), resource.spec().dim}), rows);
}

// Waits once, for the number of distinct rows.
template <typename T>
absl::Status LookUp(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecMessage message;
  int64_t num_ids, num_rows;
  Tensor *rows, *inverse;
  Tensor handles;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, resource, &message, &num_ids));
  TF_RETURN_IF_ERROR(AllocateRows(ctx, resource, num_ids, &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({num_ids}), &inverse));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({num_ids}), &handles));
  TF_RETURN_IF_ERROR(resource.StatusOf(
      fusedrec_table_lookup(resource.table(), &message, static_cast<int64_t>(StorageFor<T>()), rows->data(),
                            rows->dim_size(0), Out<int32_t>(inverse).data(), Out<int64_t>(&handles).data(), &num_rows,
                            StreamOf(ctx)),
      "the rows of a batch"));
  ctx->set_output(1, handles.Slice(0, num_rows));
  return absl::OkStatus();
}

// Nothing is read ahead: rows are on the device already, and TableRefresh is a whole lookup.
absl::Status LookAhead(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecMessage message;
  int64_t num_ids;
  Tensor *rows, *handles, *mark;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, resource, &message, &num_ids));
  TF_RETURN_IF_ERROR(AllocateRows(ctx, resource, num_ids, &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({num_ids}), &handles));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({2}), &mark));
  for (Tensor* const tensor : {rows, handles, mark}) {
    TF_RETURN_IF_ERROR(CudaStatus("look_ahead", fusedrec_fill_zeros(tensor->data(), tensor->TotalBytes(),
                                                                    StreamOf(ctx))));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Find(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecMessage message;
  int64_t num_ids;
  Tensor* rows;
  TF_RETURN_IF_ERROR(ReadMessage(ctx, resource, &message, &num_ids));
  TF_RETURN_IF_ERROR(AllocateRows(ctx, resource, num_ids, &rows));
  return resource.StatusOf(
      fusedrec_table_find(resource.table(), &message, static_cast<int64_t>(StorageFor<T>()), rows->data(),
                          rows->dim_size(0), nullptr, StreamOf(ctx)),
      "a lookup");
}

// All rows are on the device: there is nothing to fetch.
absl::Status Prefetch(OpKernelContext* ctx, const DeviceTableResource& resource) {
  FusedrecMessage message;
  int64_t num_ids;
  return ReadMessage(ctx, resource, &message, &num_ids);
}

template <typename T>
absl::Status ApplyGradients(OpKernelContext* ctx, const DeviceTableResource& resource) {
  const Tensor &handles = ctx->input(1), &inverse = ctx->input(2), &grads = ctx->input(3);
  float scale;
  StepInput step;
  TF_RETURN_IF_ERROR(CheckGradientShapes(ctx, resource.spec().dim));
  TF_RETURN_IF_ERROR(ScalarInput(ctx, 4, "scale", &scale));
  TF_RETURN_IF_ERROR(ReadStep(ctx, 5, &step));
  TF_RETURN_IF_ERROR(RequireSize("the size of inverse", inverse.NumElements()));
  const FusedrecUpdate update = DeviceUpdateOf(resource.optimizer().rule(), step);
  return resource.StatusOf(
      fusedrec_table_apply(resource.table(), In<int64_t>(handles).data(), handles.NumElements(),
                           In<int32_t>(inverse).data(), inverse.NumElements(), grads.data(),
                           static_cast<int64_t>(StorageFor<T>()), scale, &update, StreamOf(ctx)),
      "an update");
}

// A kernel that answers rows: its attribute `dim`, from which static shapes come, must be the table's.
template <absl::Status (*kRun)(OpKernelContext*, const DeviceTableResource&)>
class DeviceRowsOp : public DeviceTableKernel {
 public:
  explicit DeviceRowsOp(OpKernelConstruction* ctx) : DeviceTableKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
  }

 protected:
  absl::Status Run(OpKernelContext* ctx, const DeviceTableResource& resource) override {
    TF_RETURN_IF_ERROR(RequireDim(resource.spec(), dim_));
    return kRun(ctx, resource);
  }

 private:
  int64_t dim_;
};

}  // namespace

REGISTER_KERNEL_BUILDER(Name("Fusedrec>HashTable").Device(DEVICE_GPU).HostMemory("table"), DeviceHashTableOp);
REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>TablePrefetch").Device(DEVICE_GPU).HostMemory("table").HostMemory("received_splits"),
    DeviceTableFunctionOp<Prefetch>);
#define FUSEDREC_REGISTER(T)                                        \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableLookup")              \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits"),       \
                          DeviceRowsOp<LookUp<T>>);                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableLookAhead")           \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits"),       \
                          DeviceRowsOp<LookAhead>);                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableRefresh")             \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits"),       \
                          DeviceRowsOp<LookUp<T>>);                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableFind")                \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits"),       \
                          DeviceRowsOp<Find<T>>);                   \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableApplyGradients")      \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("scale")                  \
                              .HostMemory("learning_rate")          \
                              .HostMemory("step"),                  \
                          DeviceTableFunctionOp<ApplyGradients<T>>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
