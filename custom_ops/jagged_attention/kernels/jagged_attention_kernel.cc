#include "jagged_attention/kernels/kernel_arguments.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Inputs query, key, value, row_splits, num_targets, scale and the bias; in the gradient op behind `grads`.
template <typename T>
class JaggedAttentionBase : public OpKernel {
 public:
  JaggedAttentionBase(OpKernelConstruction* ctx, int first) : OpKernel(ctx), options_(ctx), first_(first) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
  }

 protected:
  struct Call {
    JaggedRows rows;
    AttentionInputs inputs;
    RelativeBias bias;
    Widened<T> query, key, value;
    TensorShape out_shape;
  };

  absl::Status Read(OpKernelContext* ctx, Call* call) const {
    const Tensor &query = ctx->input(first_), &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    TF_RETURN_IF_ERROR(RequireRank("query", query, 3));
    TF_RETURN_IF_ERROR(RequireRank("key", key, 3));
    TF_RETURN_IF_ERROR(RequireRank("value", value, 3));
    const Tensor* query_splits;
    TF_RETURN_IF_ERROR(QuerySplits(ctx, &query_splits));
    TF_RETURN_IF_ERROR(RequireTokens(DimsOf(query), DimsOf(key), DimsOf(value), query_splits != nullptr));
    TF_RETURN_IF_ERROR(options_.Rows(ctx, first_ + 3, key.dim_size(0), key.dim_size(1), &call->rows));
    TF_RETURN_IF_ERROR(RequireSplits("query_splits", call->rows.queries(), query.dim_size(0)));
    const Tensor& scale = ctx->input(first_ + 5);
    TF_RETURN_IF_ERROR(RequireScale(DimsOf(scale), query.dim_size(0)));
    TF_RETURN_IF_ERROR(options_.Bias(ctx, first_ + 6, call->rows, &call->bias));
    TF_RETURN_IF_ERROR(call->query.Widen(ctx, query));
    TF_RETURN_IF_ERROR(call->key.Widen(ctx, key));
    TF_RETURN_IF_ERROR(call->value.Widen(ctx, value));
    call->out_shape = value.shape();
    call->out_shape.set_dim(0, query.dim_size(0));
    call->inputs = {call->query.data(), call->key.data(), call->value.data(), query.dim_size(2),
                    value.dim_size(2),  alpha_,           In<float>(scale),   scale.dims() == 1};
    return absl::OkStatus();
  }

  const BiasAndRows options_;
  const int first_;
  float alpha_;
};

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
    Rounded<T> query_grads, key_grads, value_grads;
    OP_REQUIRES_OK(ctx, query_grads.Allocate(ctx, 0, ctx->input(1).shape()));
    OP_REQUIRES_OK(ctx, key_grads.Allocate(ctx, 1, ctx->input(2).shape()));
    OP_REQUIRES_OK(ctx, value_grads.Allocate(ctx, 2, ctx->input(3).shape()));
    BiasGrads bias_grads;
    OP_REQUIRES_OK(ctx, AllocateBiasGrads(ctx, 7, 3, this->options_, &bias_grads));
    JaggedAttentionGrad(call.rows, call.inputs, call.bias, grads.data(), BestEngine(), CpuPool(ctx),
                        query_grads.data(), key_grads.data(), value_grads.data(), bias_grads);
    query_grads.Round(ctx);
    key_grads.Round(ctx);
    value_grads.Round(ctx);
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
