#include "jagged_attention/cuda/kernels/attention_gpu_base.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Inputs gate, norm_weight and norm_bias from `first` on, for a launcher.
class GpuGate {
 public:
  explicit GpuGate(OpKernelConstruction* ctx) : arguments_(ctx) {}

  absl::Status Read(OpKernelContext* ctx, int first, const TensorShape& shape, FusedrecAttention* call) const {
    TF_RETURN_IF_ERROR(arguments_.Check(ctx, first, shape));
    const GateInputs inputs = arguments_.Inputs(ctx, first, nullptr);
    call->gate = ctx->input(first).data();
    if (!inputs.weight.empty()) {
      call->norm_weight = inputs.weight.data();
      call->norm_bias = inputs.bias.data();
    }
    call->per_head = inputs.per_head ? 1 : 0;
    call->gate_first = inputs.gate_first ? 1 : 0;
    call->epsilon = inputs.epsilon;
    return absl::OkStatus();
  }

 private:
  const GateArguments arguments_;
};

template <typename T>
class GatedAttentionGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit GatedAttentionGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 3), gate_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    const TensorShape shape = this->OutShape(ctx);
    OP_REQUIRES_OK(ctx, gate_.Read(ctx, 0, shape, &call));
    Tensor *out, *attended;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, shape, &attended));
    if (out->NumElements() == 0) return;
    call.out = attended->data();
    call.gated = out->data();
    OP_REQUIRES_OK(ctx, Launch(ctx, "jagged_attention", call, fusedrec_jagged_attention_scratch_bytes,
                               fusedrec_jagged_attention));
  }

 private:
  const GpuGate gate_;
};

template <typename T>
class GatedAttentionGradGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit GatedAttentionGradGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 5), gate_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    const TensorShape shape = this->OutShape(ctx);
    OP_REQUIRES_OK(ctx, RequireGrads(ctx->input(0), shape, "GatedAttention"));
    OP_REQUIRES_OK(ctx, RequireAttended(ctx->input(1), shape));
    OP_REQUIRES_OK(ctx, gate_.Read(ctx, 2, shape, &call));
    // Gradients of gate, norm_weight, norm_bias, query, key, value, position_weights, time_weights.
    const bool any = call.heads > 0;
    Tensor* outputs[8];
    OP_REQUIRES_OK(ctx, AllocateGradients(ctx, {{2, any}, {3, any}, {4, any}, {5, any}, {6, any}, {7, any},
                                                {11, any && this->options().position()},
                                                {12, any && this->options().time() != TimeMap::kNone}},
                                          outputs));
    if (!any) return;
    call.grads = ctx->input(0).data();
    call.out = ctx->input(1).data();
    call.gate_grads = outputs[0]->data();
    call.norm_weight_grads = outputs[1]->flat<float>().data();
    call.norm_bias_grads = outputs[2]->flat<float>().data();
    call.query_grads = outputs[3]->data();
    call.key_grads = outputs[4]->data();
    call.value_grads = outputs[5]->data();
    call.position_grads = outputs[6]->flat<float>().data();
    call.time_grads = outputs[7]->flat<float>().data();
    OP_REQUIRES_OK(ctx, Launch(ctx, "jagged_attention_grad", call, fusedrec_jagged_attention_scratch_bytes,
                               fusedrec_jagged_attention_grad));
  }

 private:
  const GpuGate gate_;
};

#define FUSEDREC_REGISTER(T)                                                     \
  FUSEDREC_REGISTER_ATTENTION(GatedAttention, GatedAttentionGpuOp<T>, T, .HostMemory("dropout_seed"))         \
  FUSEDREC_REGISTER_ATTENTION(GatedAttentionGrad, GatedAttentionGradGpuOp<T>, T, .HostMemory("dropout_seed"))
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
