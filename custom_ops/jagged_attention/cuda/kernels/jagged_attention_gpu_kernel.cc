#include "jagged_attention/cuda/kernels/attention_gpu_base.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class JaggedAttentionGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit JaggedAttentionGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 0) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    Tensor* out;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, this->OutShape(ctx), &out));
    if (out->NumElements() == 0) return;
    call.out = out->data();
    OP_REQUIRES_OK(ctx, Launch(ctx, "jagged_attention", call, fusedrec_jagged_attention_scratch_bytes,
                               fusedrec_jagged_attention));
  }
};

template <typename T>
class JaggedAttentionGradGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit JaggedAttentionGradGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 1) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, RequireGrads(ctx->input(0), this->OutShape(ctx), "JaggedAttention"));
    // Gradients of query, key, value, position_weights, time_weights.
    const bool any = call.heads > 0;
    Tensor* outputs[5];
    OP_REQUIRES_OK(ctx, AllocateGradients(ctx, {{1, any}, {2, any}, {3, any},
                                                {7, any && this->options().position()},
                                                {8, any && this->options().time() != TimeMap::kNone}},
                                          outputs));
    if (!any) return;
    call.grads = ctx->input(0).data();
    call.query_grads = outputs[0]->data();
    call.key_grads = outputs[1]->data();
    call.value_grads = outputs[2]->data();
    call.position_grads = outputs[3]->flat<float>().data();
    call.time_grads = outputs[4]->flat<float>().data();
    OP_REQUIRES_OK(ctx, Launch(ctx, "jagged_attention_grad", call, fusedrec_jagged_attention_scratch_bytes,
                               fusedrec_jagged_attention_grad));
  }
};

#define FUSEDREC_REGISTER(T)                                                       \
  FUSEDREC_REGISTER_ATTENTION(JaggedAttention, JaggedAttentionGpuOp<T>, T, .HostMemory("dropout_seed"))         \
  FUSEDREC_REGISTER_ATTENTION(JaggedAttentionGrad, JaggedAttentionGradGpuOp<T>, T, .HostMemory("dropout_seed"))
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
