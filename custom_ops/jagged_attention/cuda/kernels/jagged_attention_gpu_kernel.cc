#include <algorithm>
#include <string>

#include "jagged_attention/cuda/kernels/gpu_arguments.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Inputs query, key, value, row_splits, num_targets, scale and the bias; in the gradient op behind `grads`.
template <typename T>
class JaggedAttentionGpuBase : public OpKernel {
 public:
  JaggedAttentionGpuBase(OpKernelConstruction* ctx, int first) : OpKernel(ctx), options_(ctx), first_(first) {
    std::string time;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time", &time));
    OP_REQUIRES(ctx, time == "none" || time == "buckets",
                absl::UnimplementedError(absl::StrCat("time = '", time, "' is not there on a GPU, only 'none' and ",
                                                      "'buckets'. Place the layer on the CPU with tf.device.")));
  }

 protected:
  // Checks all inputs but grads.
  absl::Status Read(OpKernelContext* ctx, FusedrecAttention* call) const {
    const Tensor &query = ctx->input(first_), &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    const Tensor& scale = ctx->input(first_ + 5);
    const char* names[] = {"query", "key", "value"};
    for (int i = 0; i < 3; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first_ + i), 3));
    const Tensor* query_splits;
    TF_RETURN_IF_ERROR(QuerySplits(ctx, &query_splits));
    TF_RETURN_IF_ERROR(RequireTokens(DimsOf(query), DimsOf(key), DimsOf(value), query_splits != nullptr));
    *call = {};
    call->type = NumberTypeOf<T>();
    call->qk_dim = query.dim_size(2);
    call->value_dim = value.dim_size(2);
    if (std::max(call->qk_dim, call->value_dim) > kAttentionMaxDim) {
      return absl::InvalidArgumentError(absl::StrCat("heads must have at most ", kAttentionMaxDim,
                                                     " columns on a GPU, got ", call->qk_dim, " and ", call->value_dim,
                                                     ". Use more heads."));
    }
    TF_RETURN_IF_ERROR(RequireScale(DimsOf(scale), query.dim_size(0)));
    call->scale = In<float>(scale).data();
    call->scale_stride = scale.dims();
    call->alpha = alpha_;
    call->query = query.data();
    call->key = key.data();
    call->value = value.data();
    TF_RETURN_IF_ERROR(
        ReadRowsAndBias(ctx, options_, first_ + 3, first_ + 6, key.dim_size(0), key.dim_size(1), call));
    if (query_splits == nullptr) return absl::OkStatus();
    return RequireSplits("query_splits", In<int64_t>(*query_splits), query.dim_size(0));
  }

  // [Tq, H, Dv].
  TensorShape OutShape(OpKernelContext* ctx) const {
    TensorShape shape = ctx->input(first_ + 2).shape();
    shape.set_dim(0, ctx->input(first_).dim_size(0));
    return shape;
  }

  const BiasAndRows& options() const { return options_; }

 private:
  const BiasAndRows options_;
  const int first_;
  float alpha_;
};

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
  FUSEDREC_REGISTER_ATTENTION(JaggedAttention, JaggedAttentionGpuOp<T>, T)         \
  FUSEDREC_REGISTER_ATTENTION(JaggedAttentionGrad, JaggedAttentionGradGpuOp<T>, T)
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
