// Inputs of the ops that attend with queries and keys, for their GPU kernels.
#pragma once

#include <algorithm>

#include "jagged_attention/cuda/kernels/gpu_arguments.h"

namespace fusedrec {

// Reads query, key, value, row_splits, num_targets, scale and the bias, which begin at input `first`.
template <typename T>
class JaggedAttentionGpuBase : public tensorflow::OpKernel {
 public:
  JaggedAttentionGpuBase(tensorflow::OpKernelConstruction* ctx, int first)
      : tensorflow::OpKernel(ctx), options_(ctx), first_(first) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
  }

 protected:
  // Checks all inputs but grads.
  absl::Status Read(tensorflow::OpKernelContext* ctx, FusedrecAttention* call) const {
    const tensorflow::Tensor& query = ctx->input(first_);
    const tensorflow::Tensor &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    const tensorflow::Tensor& scale = ctx->input(first_ + 5);
    const char* names[] = {"query", "key", "value"};
    for (int i = 0; i < 3; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first_ + i), 3));
    const tensorflow::Tensor* query_splits;
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
  tensorflow::TensorShape OutShape(tensorflow::OpKernelContext* ctx) const {
    tensorflow::TensorShape shape = ctx->input(first_ + 2).shape();
    shape.set_dim(0, ctx->input(first_).dim_size(0));
    return shape;
  }

  const BiasAndRows& options() const { return options_; }

 private:
  const BiasAndRows options_;
  const int first_;
  float alpha_;
};

}  // namespace fusedrec
