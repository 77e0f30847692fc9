#include "jagged_attention/cuda/kernels/gpu_arguments.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Inputs value, row_splits, num_targets and the bias; in the gradient op behind `grads`.
template <typename T>
class JaggedBiasAttentionGpuBase : public OpKernel {
 public:
  JaggedBiasAttentionGpuBase(OpKernelConstruction* ctx, int first) : OpKernel(ctx), options_(ctx), first_(first) {}

 protected:
  // Checks all inputs but grads; `shape` is that of out.
  absl::Status Read(OpKernelContext* ctx, FusedrecAttention* call, TensorShape* shape) const {
    const Tensor& value = ctx->input(first_);
    TF_RETURN_IF_ERROR(RequireRank("value", value, 3));
    *call = {};
    call->type = NumberTypeOf<T>();
    call->value = value.data();
    call->value_dim = value.dim_size(2);
    TF_RETURN_IF_ERROR(
        ReadRowsAndBias(ctx, options_, first_ + 1, first_ + 3, value.dim_size(0), value.dim_size(1), call));
    *shape = value.shape();
    if (call->query_splits != nullptr) shape->set_dim(0, call->query_splits[call->batch]);
    shape->set_dim(2, options_.channels() * value.dim_size(2));
    if (shape->num_elements() == 0) return absl::OkStatus();
    return RequireSize("the number of columns of all heads and channels", shape->dim_size(1) * shape->dim_size(2));
  }

  const BiasAndRows& options() const { return options_; }

 private:
  const BiasAndRows options_;
  const int first_;
};

template <typename T>
class JaggedBiasAttentionGpuOp : public JaggedBiasAttentionGpuBase<T> {
 public:
  explicit JaggedBiasAttentionGpuOp(OpKernelConstruction* ctx) : JaggedBiasAttentionGpuBase<T>(ctx, 0) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    TensorShape shape;
    Tensor* out;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call, &shape));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    if (out->NumElements() == 0) return;
    call.out = out->data();
    OP_REQUIRES_OK(
        ctx, Launch(ctx, "bias_attention", call, fusedrec_bias_attention_scratch_bytes, fusedrec_bias_attention));
  }
};

template <typename T>
class JaggedBiasAttentionGradGpuOp : public JaggedBiasAttentionGpuBase<T> {
 public:
  explicit JaggedBiasAttentionGradGpuOp(OpKernelConstruction* ctx) : JaggedBiasAttentionGpuBase<T>(ctx, 1) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& grads = ctx->input(0);
    FusedrecAttention call;
    TensorShape shape;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call, &shape));
    OP_REQUIRES_OK(ctx, RequireGrads(grads, shape, "JaggedBiasAttention"));
    // Gradients of value, position_weights, time_weights.
    const bool any = grads.NumElements() > 0;
    Tensor* outputs[3];
    OP_REQUIRES_OK(ctx, AllocateGradients(ctx, {{1, any},
                                                {4, any && this->options().position()},
                                                {5, any && this->options().time() != TimeMap::kNone}},
                                          outputs));
    if (!any) return;
    call.grads = grads.data();
    call.value_grads = outputs[0]->data();
    call.position_grads = outputs[1]->flat<float>().data();
    call.time_grads = outputs[2]->flat<float>().data();
    OP_REQUIRES_OK(ctx, Launch(ctx, "bias_attention_grad", call, fusedrec_bias_attention_scratch_bytes,
                               fusedrec_bias_attention_grad));
  }
};

#define FUSEDREC_REGISTER(T)                                                               \
  FUSEDREC_REGISTER_ATTENTION(JaggedBiasAttention, JaggedBiasAttentionGpuOp<T>, T,)         \
  FUSEDREC_REGISTER_ATTENTION(JaggedBiasAttentionGrad, JaggedBiasAttentionGradGpuOp<T>, T,)
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
