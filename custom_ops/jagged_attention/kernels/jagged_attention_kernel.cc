#include "jagged_attention/kernels/attention_base.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

template <typename T>
class JaggedAttentionOp : public JaggedAttentionBase<T> {
 public:
  explicit JaggedAttentionOp(OpKernelConstruction* ctx) : JaggedAttentionBase<T>(ctx, 0) {}

  void Compute(OpKernelContext* ctx) override {
    typename JaggedAttentionBase<T>::Call call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    Rounded<T> out;
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, 0, call.out_shape));
    JaggedAttention(call.rows, call.inputs, call.bias, BestEngine(), CpuPool(ctx), out.data());
    out.Round(ctx);
  }
};

template <typename T>
class JaggedAttentionGradOp : public JaggedAttentionBase<T> {
 public:
  explicit JaggedAttentionGradOp(OpKernelConstruction* ctx) : JaggedAttentionBase<T>(ctx, 1) {}

  void Compute(OpKernelContext* ctx) override {
    typename JaggedAttentionBase<T>::Call call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, RequireGrads(ctx->input(0), call.out_shape, "JaggedAttention"));
    Widened<T> grads;
    OP_REQUIRES_OK(ctx, grads.Widen(ctx, ctx->input(0)));
    AttentionGradients<T> gradients;
    OP_REQUIRES_OK(ctx, gradients.Allocate(ctx, 1, 0, this->options_));
    gradients.Compute(ctx, call.rows, call.inputs, call.bias, grads.data());
  }
};

#define FUSEDREC_REGISTER(T)                                                                              \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedAttention").Device(DEVICE_CPU).TypeConstraint<T>("T"),     \
                          JaggedAttentionOp<T>);                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedAttentionGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          JaggedAttentionGradOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
