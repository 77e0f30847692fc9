#include "jagged_attention/kernels/attention_base.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class GatedAttentionOp : public JaggedAttentionBase<T> {
 public:
  explicit GatedAttentionOp(OpKernelConstruction* ctx) : JaggedAttentionBase<T>(ctx, 3), gate_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    typename JaggedAttentionBase<T>::Call call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, gate_.Check(ctx, 0, call.out_shape));
    Widened<T> wide_gate;
    OP_REQUIRES_OK(ctx, wide_gate.Widen(ctx, ctx->input(0)));
    Rounded<T> out, attended;
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, 0, call.out_shape));
    OP_REQUIRES_OK(ctx, attended.Allocate(ctx, 1, call.out_shape));
    GatedAttention(call.rows, call.inputs, gate_.Inputs(ctx, 0, wide_gate.data()), call.bias, BestEngine(),
                   CpuPool(ctx), attended.data(), out.data());
    out.Round(ctx);
    attended.Round(ctx);
  }

 private:
  const GateArguments gate_;
};

template <typename T>
class GatedAttentionGradOp : public JaggedAttentionBase<T> {
 public:
  explicit GatedAttentionGradOp(OpKernelConstruction* ctx) : JaggedAttentionBase<T>(ctx, 5), gate_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    typename JaggedAttentionBase<T>::Call call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, RequireGrads(ctx->input(0), call.out_shape, "GatedAttention"));
    OP_REQUIRES_OK(ctx, RequireAttended(ctx->input(1), call.out_shape));
    OP_REQUIRES_OK(ctx, gate_.Check(ctx, 2, call.out_shape));
    Widened<T> grads, attended, wide_gate;
    OP_REQUIRES_OK(ctx, grads.Widen(ctx, ctx->input(0)));
    OP_REQUIRES_OK(ctx, attended.Widen(ctx, ctx->input(1)));
    OP_REQUIRES_OK(ctx, wide_gate.Widen(ctx, ctx->input(2)));
    Rounded<T> gate_grads;
    Tensor attended_grads, *weight_grads, *bias_grads;
    OP_REQUIRES_OK(ctx, gate_grads.Allocate(ctx, 0, call.out_shape));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, ctx->input(3).shape(), &weight_grads));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, ctx->input(4).shape(), &bias_grads));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_FLOAT, call.out_shape, &attended_grads));
    AttentionGradients<T> gradients;
    OP_REQUIRES_OK(ctx, gradients.Allocate(ctx, 5, 3, this->options_));
    float* const of_attended = attended_grads.flat<float>().data();
    OutputGateGrad(call.rows.heads, call.inputs.value_dim, call.out_shape.dim_size(0),
                   gate_.Inputs(ctx, 2, wide_gate.data()), attended.data(), grads.data(), BestEngine(), CpuPool(ctx),
                   of_attended, {gate_grads.data(), Out<float>(weight_grads), Out<float>(bias_grads)});
    gate_grads.Round(ctx);
    gradients.Compute(ctx, call.rows, call.inputs, call.bias, of_attended);
  }

 private:
  const GateArguments gate_;
};

#define FUSEDREC_REGISTER(T)                                                                             \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>GatedAttention").Device(DEVICE_CPU).TypeConstraint<T>("T"),     \
                          GatedAttentionOp<T>);                                                          \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>GatedAttentionGrad").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          GatedAttentionGradOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
