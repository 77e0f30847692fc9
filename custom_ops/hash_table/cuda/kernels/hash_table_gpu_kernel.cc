// Kernels of the training step for a table on a device. The launchers of hash_table_cuda.h do the work.
#include <cstring>
#include <string>

#include "common/bucket.h"
#include "hash_table/cuda/kernels/device_table_resource.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;

class DeviceHashTableOp : public tensorflow::ResourceOpKernel<DeviceTableResource> {
 public:
  explicit DeviceHashTableOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadAttributes(ctx, kOnDevice, &spec_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &anonymous_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::mutex_lock lock(context_mutex_);
    context_ = ctx;
    if (anonymous_) {
      MakeAnonymous(ctx);
    } else {
      ResourceOpKernel::Compute(ctx);
    }
    context_ = nullptr;
  }

 private:
  void MakeAnonymous(OpKernelContext* ctx) {
    DeviceTableResource* resource = nullptr;
    OP_REQUIRES_OK(ctx, CreateResource(&resource));
    OP_REQUIRES_OK(ctx, OutputOwningHandle(ctx, resource));
  }

  absl::Status CreateResource(DeviceTableResource** resource) override {
    return DeviceTableResource::Make(context_, spec_, resource);
  }

  TableSpec spec_;
  bool anonymous_;
  tensorflow::mutex context_mutex_;
  OpKernelContext* context_ = nullptr;  // of the call under way
};

namespace {

absl::Status AllocateRows(OpKernelContext* ctx, const DeviceTableResource& resource, int64_t num_ids, Tensor** rows) {
  return ctx->allocate_output(0, TensorShape({BucketedSize(num_ids), resource.spec().dim}), rows);
}

// Looks up into `rows`, null for none, and gives the last two outputs. Waits, for the number of distinct rows.
// look_ahead: number of a look-ahead of rows in host memory.
absl::Status LookUpInto(OpKernelContext* ctx, const DeviceTableResource& resource, const MessageInput& in,
                        int64_t look_ahead, Storage storage, Tensor* rows) {
  const int of_handles = ctx->num_outputs() - 2;
  int64_t num_rows;
  Tensor* inverse;
  Tensor handles;
  TF_RETURN_IF_ERROR(ctx->allocate_output(of_handles + 1, TensorShape({in.num_ids}), &inverse));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({in.num_ids}), &handles));
  const int64_t kind = static_cast<int64_t>(storage), out_rows = rows == nullptr ? 0 : rows->dim_size(0);
  void* const out = rows == nullptr ? nullptr : rows->data();
  int32_t* const numbers = Out<int32_t>(inverse).data();
  int64_t* const found = Out<int64_t>(&handles).data();
  if (resource.host_rows() != nullptr) {
    const HostRows::Call call{in.message, ctx->input(1).NumElements(), CpuPool(ctx), StreamOf(ctx)};
    TF_RETURN_IF_ERROR(resource.host_rows()->Lookup(call, look_ahead, kind, out, out_rows, numbers, found, &num_rows));
  } else {
    TF_RETURN_IF_ERROR(resource.StatusOf(fusedrec_table_lookup(resource.table(), &in.message, kind, out, out_rows,
                                                               numbers, found, &num_rows, StreamOf(ctx)),
                                         "the rows of a batch"));
  }
  ctx->set_output(of_handles, handles.Slice(0, num_rows));
  return absl::OkStatus();
}

template <typename T>
absl::Status LookUpFrom(OpKernelContext* ctx, const DeviceTableResource& resource, int64_t look_ahead) {
  MessageInput in;
  Tensor* rows;
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  TF_RETURN_IF_ERROR(AllocateRows(ctx, resource, in.num_ids, &rows));
  return LookUpInto(ctx, resource, in, look_ahead, StorageFor<T>(), rows);
}

absl::Status Touch(OpKernelContext* ctx, const DeviceTableResource& resource) {
  MessageInput in;
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  return LookUpInto(ctx, resource, in, 0, Storage::kFloat32, nullptr);
}

template <typename T>
absl::Status LookUp(OpKernelContext* ctx, const DeviceTableResource& resource) {
  return LookUpFrom<T>(ctx, resource, 0);
}

template <typename T>
absl::Status Refresh(OpKernelContext* ctx, const DeviceTableResource& resource) {
  const Tensor& mark = ctx->input(5);
  if (mark.shape() != TensorShape({3})) {
    return absl::InvalidArgumentError(
        absl::StrCat("mark must be of a TableLookAhead, of shape [3], got ", mark.shape().DebugString(), "."));
  }
  return LookUpFrom<T>(ctx, resource, mark.flat<int64_t>()(0));
}

// A table with all rows on the device reads nothing ahead, and its TableRefresh is a whole lookup. A table with rows in host
// memory keeps the rows in its buffers; the mark holds the number of the look-ahead. The message is in host memory, so that
// nothing waits for kernels of other work (docs/gpu.md, "Streams").
absl::Status LookAhead(OpKernelContext* ctx, const DeviceTableResource& resource) {
  MessageInput in;
  int64_t look_ahead = 0;
  Tensor *rows, *handles, *mark;
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({0, resource.spec().dim}), &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({0}), &handles));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({3}), &mark));
  if (resource.host_rows() != nullptr) {
    const HostRows::Call call{in.message, ctx->input(1).NumElements(), CpuPool(ctx), StreamOf(ctx), true};
    TF_RETURN_IF_ERROR(resource.host_rows()->LookAhead(call, &look_ahead));
  }
  mark->flat<int64_t>().setZero();
  mark->flat<int64_t>()(0) = look_ahead;
  return absl::OkStatus();
}

// `peeks`: for the next training lookup, whose look-ahead is of no use here: no row is on the device because of it.
template <typename T, bool peeks>
absl::Status Find(OpKernelContext* ctx, const DeviceTableResource& resource) {
  MessageInput in;
  Tensor* rows;
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  TF_RETURN_IF_ERROR(AllocateRows(ctx, resource, in.num_ids, &rows));
  if (resource.host_rows() == nullptr) {
    const int64_t kind = static_cast<int64_t>(StorageFor<T>()), out_rows = rows->dim_size(0);
    void* const stream = StreamOf(ctx);
    return resource.StatusOf(
        peeks ? fusedrec_table_peek(resource.table(), &in.message, kind, rows->data(), out_rows, stream)
              : fusedrec_table_find(resource.table(), &in.message, kind, rows->data(), out_rows, nullptr, stream),
        "a lookup");
  }
  Tensor found;
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  TF_RETURN_IF_ERROR(ctx->allocate_temp(rows->dtype(), rows->shape(), &found, on_host));
  const int64_t used = in.num_ids * resource.spec().dim * sizeof(T);
  std::memset(static_cast<char*>(found.data()) + used, 0, found.TotalBytes() - used);
  const HostRows::Call call{in.message, ctx->input(1).NumElements(), CpuPool(ctx), StreamOf(ctx)};
  TF_RETURN_IF_ERROR(resource.host_rows()->Find(call, StorageFor<T>(), found.data(), peeks));
  return CudaStatus("copy_to_device",
                    fusedrec_copy_to_device(rows->data(), found.data(), found.TotalBytes(), StreamOf(ctx)));
}

// Asks the disk for rows in a file. A table with all rows on the device has nothing to fetch. The message is in host memory.
absl::Status Prefetch(OpKernelContext* ctx, const DeviceTableResource& resource) {
  MessageInput in;
  TF_RETURN_IF_ERROR(ReadDeviceMessage(ctx, resource, &in));
  if (resource.host_rows() == nullptr || resource.spec().memory_budget == 0) return absl::OkStatus();
  const HostRows::Call call{in.message, ctx->input(1).NumElements(), CpuPool(ctx), StreamOf(ctx), true};
  return resource.host_rows()->Prefetch(call);
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
    Name("Fusedrec>TablePrefetch")
        .Device(DEVICE_GPU)
        .HostMemory("table")
        .HostMemory("message")
        .HostMemory("received_splits"),
    DeviceTableFunctionOp<Prefetch>);
REGISTER_KERNEL_BUILDER(
    Name("Fusedrec>TableTouch").Device(DEVICE_GPU).HostMemory("table").HostMemory("received_splits"),
    DeviceTableFunctionOp<Touch>);
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
                              .HostMemory("message")                \
                              .HostMemory("received_splits")        \
                              .HostMemory("mark"),                  \
                          DeviceRowsOp<LookAhead>);                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableRefresh")             \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits")        \
                              .HostMemory("mark"),                  \
                          DeviceRowsOp<Refresh<T>>);                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TableFind")                \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits"),       \
                          DeviceRowsOp<Find<T, false>>);            \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>TablePeek")                \
                              .Device(DEVICE_GPU)                   \
                              .TypeConstraint<T>("T")               \
                              .HostMemory("table")                  \
                              .HostMemory("received_splits")        \
                              .HostMemory("mark"),                  \
                          DeviceRowsOp<Find<T, true>>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
