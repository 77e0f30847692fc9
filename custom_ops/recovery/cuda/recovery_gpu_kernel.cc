#include <vector>

#include "common/gpu_kernel_util.h"
#include "recovery/bags.h"
#include "recovery/cuda/recovery_cuda.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

template <typename T>
absl::Status CopyToHost(OpKernelContext* ctx, const Tensor& t, std::vector<T>* host) {
  host->resize(t.NumElements());
  return CudaStatus("copy to the host",
                    fusedrec_copy_to_host(host->data(), t.data(), host->size() * sizeof(T), StreamOf(ctx)));
}

// Answer of a launcher of the pooled forms as a Status. The checks of the kernels for the CPU look here for the refused
// bag or index. Inputs come to the host only for that. at: number of the input `index`, before bag_splits.
absl::Status PooledStatus(OpKernelContext* ctx, const char* launcher, int answer, int64_t num_rows, int at = 1) {
  if (answer != kCudaInvalidValue) return CudaStatus(launcher, answer);
  std::vector<int32_t> index;
  std::vector<int64_t> splits;
  TF_RETURN_IF_ERROR(CopyToHost(ctx, ctx->input(at), &index));
  TF_RETURN_IF_ERROR(CopyToHost(ctx, ctx->input(at + 1), &splits));
  TF_RETURN_IF_ERROR(RequireIndex(index, num_rows));
  TF_RETURN_IF_ERROR(RequireSplits("bag_splits", splits, index.size()));
  return CudaStatus(launcher, answer);
}

}  // namespace

template <typename T>
class RecoverGpuOp : public OpKernel {
 public:
  explicit RecoverGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    const int64_t num_index = index.NumElements(), dim = rows.dim_size(1);
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", num_index));
    const int64_t out_rows = pad_ ? BucketedSize(num_index) : num_index;
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    OP_REQUIRES_OK(ctx, CudaStatus("recover", fusedrec_recover(rows.data(), rows.dim_size(0), dim * sizeof(T),
                                                               In<int32_t>(index).data(), num_index, out->data(),
                                                               out_rows, StreamOf(ctx))));
  }

 private:
  bool pad_;
};

// Waits once, for whether the bags are sound; so does its gradient.
template <typename T>
class PooledRecoverGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &index = ctx->input(1), &splits = ctx->input(2), &scale = ctx->input(3);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireBagShapes(splits, scale));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    const int64_t dim = rows.dim_size(1), bags = scale.NumElements();
    Tensor scratch;
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_pooled_recover_scratch_bytes(), &scratch));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({bags, dim}), &out));
    const int answer = fusedrec_pooled_recover(
        NumberTypeOf<T>(), rows.data(), rows.dim_size(0), dim, In<int32_t>(index).data(), index.NumElements(),
        In<int64_t>(splits).data(), In<float>(scale).data(), bags, scratch.data(), out->data(), StreamOf(ctx));
    OP_REQUIRES_OK(ctx, PooledStatus(ctx, "pooled_recover", answer, rows.dim_size(0)));
  }
};

template <typename T>
class PooledRecoverPartsGpuOp : public OpKernel {
 public:
  explicit PooledRecoverPartsGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::OpInputList parts;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &parts));
    const int count = parts.size();
    const Tensor &index = ctx->input(count), &splits = ctx->input(count + 1), &scale = ctx->input(count + 2);
    int64_t num_rows;
    OP_REQUIRES_OK(ctx, RequireParts(parts, &num_rows));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireBagShapes(splits, scale));
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", index.NumElements()));
    OP_REQUIRES_OK(ctx, RequireSize("the number of rows", num_rows));
    const int64_t dim = parts[0].dim_size(1), bags = scale.NumElements();
    const int64_t out_rows = pad_ ? BucketedSize(bags) : bags;
    std::vector<const void*> arrays;
    std::vector<int64_t> rows;
    for (const Tensor& part : parts) {
      arrays.push_back(part.data());
      rows.push_back(part.dim_size(0));
    }
    Tensor scratch;
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_pooled_recover_parts_scratch_bytes(count), &scratch));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    const int answer = fusedrec_pooled_recover_parts(
        NumberTypeOf<T>(), arrays.data(), rows.data(), count, dim, In<int32_t>(index).data(), index.NumElements(),
        In<int64_t>(splits).data(), In<float>(scale).data(), bags, scratch.data(), out->data(), out_rows, StreamOf(ctx));
    OP_REQUIRES_OK(ctx, PooledStatus(ctx, "pooled_recover_parts", answer, num_rows, count));
  }

 private:
  bool pad_;
};

// Inputs grads, index; pooled: bag_splits, bag_scale; num_rows.
template <typename T, bool kPooled>
class RecoverGradGpuOp : public OpKernel {
 public:
  explicit RecoverGradGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("grads", grads, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    const int64_t num_index = index.NumElements(), dim = grads.dim_size(1);
    OP_REQUIRES_OK(ctx, RequireSize("the size of index", num_index));
    int64_t rows, out_rows, bags = 0;
    const int64_t* splits = nullptr;
    const float* scale = nullptr;
    if (kPooled) {
      OP_REQUIRES_OK(ctx, RequireBagShapes(ctx->input(2), ctx->input(3)));
      splits = In<int64_t>(ctx->input(2)).data();
      scale = In<float>(ctx->input(3)).data();
      bags = ctx->input(3).NumElements();
      OP_REQUIRES(ctx, grads.dim_size(0) == bags,
                  absl::InvalidArgumentError(absl::StrCat("grads must have a row for each of the ", bags,
                                                          " bags, got ", grads.dim_size(0),
                                                          ". Pass the gradient of PooledRecover's output.")));
    } else {
      OP_REQUIRES(ctx, grads.dim_size(0) >= num_index,
                  absl::InvalidArgumentError(absl::StrCat("grads must have a row for each of the ", num_index,
                                                          " entries of index, got ", grads.dim_size(0),
                                                          ". Pass the gradient of Recover's output.")));
    }
    OP_REQUIRES_OK(ctx, ReadNumRows(ctx->input(kPooled ? 4 : 2), pad_, &rows, &out_rows));
    OP_REQUIRES_OK(ctx, RequireSize("num_rows, padded,", out_rows));
    Tensor scratch;
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateScratch(ctx, fusedrec_recover_grad_scratch_bytes(num_index, dim), &scratch));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    const int answer = fusedrec_recover_grad(NumberTypeOf<T>(), grads.data(), dim, In<int32_t>(index).data(), num_index,
                                             splits, scale, bags, scratch.data(), out->data(), rows, out_rows,
                                             StreamOf(ctx));
    OP_REQUIRES_OK(ctx, kPooled ? PooledStatus(ctx, "recover_grad", answer, rows) : CudaStatus("recover_grad", answer));
  }

 private:
  bool pad_;
};

#define FUSEDREC_REGISTER(T)                                                                                       \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>Recover").Device(DEVICE_GPU).TypeConstraint<T>("T"), RecoverGpuOp<T>);    \
  REGISTER_KERNEL_BUILDER(                                                                                         \
      Name("Fusedrec>RecoverGrad").Device(DEVICE_GPU).TypeConstraint<T>("T").HostMemory("num_rows"),               \
      RecoverGradGpuOp<T, false>);                                                                                 \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>PooledRecover").Device(DEVICE_GPU).TypeConstraint<T>("T"),                \
                          PooledRecoverGpuOp<T>);                                                                  \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>PooledRecoverParts").Device(DEVICE_GPU).TypeConstraint<T>("T"),           \
                          PooledRecoverPartsGpuOp<T>);                                                             \
  REGISTER_KERNEL_BUILDER(                                                                                         \
      Name("Fusedrec>PooledRecoverGrad").Device(DEVICE_GPU).TypeConstraint<T>("T").HostMemory("num_rows"),         \
      RecoverGradGpuOp<T, true>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
