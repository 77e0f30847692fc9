// Inputs of the ops that attend with queries and keys, for their CPU kernels.
#pragma once

#include "jagged_attention/kernels/kernel_arguments.h"

namespace fusedrec {

// Reads query, key, value, row_splits, num_targets, scale and the bias, which begin at input `first`.
template <typename T>
class JaggedAttentionBase : public tensorflow::OpKernel {
 public:
  JaggedAttentionBase(tensorflow::OpKernelConstruction* ctx, int first)
      : tensorflow::OpKernel(ctx), options_(ctx), first_(first) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
  }

 protected:
  struct Call {
    JaggedRows rows;
    AttentionInputs inputs;
    RelativeBias bias;
    Widened<T> query, key, value;
    tensorflow::TensorShape out_shape;
  };

  absl::Status Read(tensorflow::OpKernelContext* ctx, Call* call) const {
    const tensorflow::Tensor& query = ctx->input(first_);
    const tensorflow::Tensor &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    TF_RETURN_IF_ERROR(RequireRank("query", query, 3));
    TF_RETURN_IF_ERROR(RequireRank("key", key, 3));
    TF_RETURN_IF_ERROR(RequireRank("value", value, 3));
    const tensorflow::Tensor* query_splits;
    TF_RETURN_IF_ERROR(QuerySplits(ctx, &query_splits));
    TF_RETURN_IF_ERROR(RequireTokens(DimsOf(query), DimsOf(key), DimsOf(value), query_splits != nullptr));
    TF_RETURN_IF_ERROR(options_.Rows(ctx, first_ + 3, key.dim_size(0), key.dim_size(1), &call->rows));
    TF_RETURN_IF_ERROR(RequireSplits("query_splits", call->rows.queries(), query.dim_size(0)));
    const tensorflow::Tensor& scale = ctx->input(first_ + 5);
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

// The gradients of query, key, value and the weights of the bias: outputs `first_output` on, for inputs `first` on.
template <typename T>
class AttentionGradients {
 public:
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, int first, int first_output, const BiasAndRows& options) {
    for (int i = 0; i < 3; ++i) {
      TF_RETURN_IF_ERROR(tokens_[i].Allocate(ctx, first_output + i, ctx->input(first + i).shape()));
    }
    return AllocateBiasGrads(ctx, first + 6, first_output + 3, options, &bias_);
  }

  void Compute(tensorflow::OpKernelContext* ctx, const JaggedRows& rows, const AttentionInputs& inputs,
               const RelativeBias& bias, const float* grads) {
    JaggedAttentionGrad(rows, inputs, bias, grads, BestEngine(), CpuPool(ctx), tokens_[0].data(), tokens_[1].data(),
                        tokens_[2].data(), bias_);
    for (Rounded<T>& rounded : tokens_) rounded.Round(ctx);
  }

 private:
  Rounded<T> tokens_[3];
  BiasGrads bias_;
};

}  // namespace fusedrec
