#include "common/bucket.h"
#include "common/kernel_util.h"
#include "recovery/recovery.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

absl::Status RequireIndex(absl::Span<const int32_t> index, int64_t rows) {
  const int64_t bad = FirstOutOfRange(index, rows);
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("index[", bad, "] must lie in [0, ", rows, "), got ", index[bad],
                                                 ". Compose it from the outputs of SegmentUnique and RankPartition."));
}

}  // namespace

template <typename T>
class RecoverOp : public OpKernel {
 public:
  explicit RecoverOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& rows = ctx->input(0);
    const Tensor& index = ctx->input(1);
    OP_REQUIRES_OK(ctx, RequireRank("rows", rows, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows.dim_size(0)));

    const int64_t dim = rows.dim_size(1);
    const int64_t out_rows = pad_ ? BucketedSize(index.NumElements()) : index.NumElements();
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0) return;
    Recover(static_cast<const char*>(rows.data()), dim * sizeof(T), In<int32_t>(index), CpuPool(ctx),
            static_cast<char*>(out->data()), out_rows);
  }

 private:
  bool pad_;
};

template <typename T>
class RecoverGradOp : public OpKernel {
 public:
  explicit RecoverGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("pad", &pad_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& grads = ctx->input(0);
    const Tensor& index = ctx->input(1);
    const Tensor& num_rows = ctx->input(2);
    OP_REQUIRES_OK(ctx, RequireRank("grads", grads, 2));
    OP_REQUIRES_OK(ctx, RequireRank("index", index, 1));
    OP_REQUIRES_OK(ctx, RequireRank("num_rows", num_rows, 0));
    const int64_t rows = num_rows.scalar<int64_t>()();
    OP_REQUIRES(ctx, rows >= 0,
                absl::InvalidArgumentError(absl::StrCat("num_rows must be >= 0, got ", rows,
                                                        ". Pass the number of rows that Recover read from.")));
    OP_REQUIRES(ctx, grads.dim_size(0) >= index.NumElements(),
                absl::InvalidArgumentError(absl::StrCat("grads must have a row for each of the ", index.NumElements(),
                                                        " entries of index, got ", grads.dim_size(0),
                                                        ". Pass the gradient of Recover's output.")));
    OP_REQUIRES_OK(ctx, RequireIndex(In<int32_t>(index), rows));

    const int64_t dim = grads.dim_size(1);
    Tensor* out;
    const int64_t out_rows = pad_ ? BucketedSize(rows) : rows;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({out_rows, dim}), &out));
    if (out->NumElements() == 0) return;
    RecoverGrad(grads.flat<T>().data(), dim, In<int32_t>(index), CpuPool(ctx), out->flat<T>().data(), out_rows);
  }

 private:
  bool pad_;
};

#define FUSEDREC_REGISTER(T)                                                                              \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>Recover").Device(DEVICE_CPU).TypeConstraint<T>("T"), RecoverOp<T>); \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>RecoverGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"), RecoverGradOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
