#include "jagged_attention/kernels/kernel_arguments.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename T>
class JaggedBiasAttentionOp : public OpKernel {
 public:
  explicit JaggedBiasAttentionOp(OpKernelConstruction* ctx) : OpKernel(ctx), options_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& value = ctx->input(0);
    JaggedRows rows;
    RelativeBias bias;
    OP_REQUIRES_OK(ctx, RequireRank("value", value, 3));
    OP_REQUIRES_OK(ctx, options_.Rows(ctx, 1, value.dim_size(0), value.dim_size(1), &rows));
    OP_REQUIRES_OK(ctx, options_.Bias(ctx, 3, rows, &bias));
    Widened<T> wide;
    OP_REQUIRES_OK(ctx, wide.Widen(ctx, value));
    TensorShape shape = value.shape();
    shape.set_dim(0, rows.queries().back());
    shape.set_dim(2, options_.channels() * value.dim_size(2));
    Rounded<T> out;
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, 0, shape));
    JaggedBiasAttention(rows, wide.data(), value.dim_size(2), bias, BestEngine(), CpuPool(ctx), out.data());
    out.Round(ctx);
  }

 private:
  const BiasAndRows options_;
};

template <typename T>
class JaggedBiasAttentionGradOp : public OpKernel {
 public:
  explicit JaggedBiasAttentionGradOp(OpKernelConstruction* ctx) : OpKernel(ctx), options_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &value = ctx->input(1);
    JaggedRows rows;
    RelativeBias bias;
    OP_REQUIRES_OK(ctx, RequireRank("value", value, 3));
    OP_REQUIRES_OK(ctx, options_.Rows(ctx, 2, value.dim_size(0), value.dim_size(1), &rows));
    OP_REQUIRES_OK(ctx, options_.Bias(ctx, 4, rows, &bias));
    TensorShape shape = value.shape();
    shape.set_dim(0, rows.queries().back());
    shape.set_dim(2, options_.channels() * value.dim_size(2));
    OP_REQUIRES_OK(ctx, RequireGrads(grads, shape, "JaggedBiasAttention"));
    Widened<T> wide_value, wide_grads;
    OP_REQUIRES_OK(ctx, wide_value.Widen(ctx, value));
    OP_REQUIRES_OK(ctx, wide_grads.Widen(ctx, grads));
    Rounded<T> value_grads;
    OP_REQUIRES_OK(ctx, value_grads.Allocate(ctx, 0, value.shape()));
    BiasGrads bias_grads;
    OP_REQUIRES_OK(ctx, AllocateBiasGrads(ctx, 4, 1, options_, &bias_grads));
    JaggedBiasAttentionGrad(rows, wide_value.data(), value.dim_size(2), bias, wide_grads.data(), BestEngine(),
                            CpuPool(ctx), value_grads.data(), bias_grads);
    value_grads.Round(ctx);
  }

 private:
  const BiasAndRows options_;
};

#define FUSEDREC_REGISTER(T)                                                                                  \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedBiasAttention").Device(DEVICE_CPU).TypeConstraint<T>("T"),     \
                          JaggedBiasAttentionOp<T>);                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedBiasAttentionGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          JaggedBiasAttentionGradOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
