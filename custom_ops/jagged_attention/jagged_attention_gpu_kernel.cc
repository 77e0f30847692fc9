#include <algorithm>
#include <string>
#include <vector>

#include "common/gpu_kernel_util.h"
#include "jagged_attention/jagged_attention_cuda.h"
#include "jagged_attention/validation.h"

namespace fusedrec {

using tensorflow::DEVICE_GPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Inputs query, key, value, row_splits, num_targets, scale and the bias; in the gradient op behind `grads`.
template <typename T>
class JaggedAttentionGpuBase : public OpKernel {
 public:
  JaggedAttentionGpuBase(OpKernelConstruction* ctx, int first) : OpKernel(ctx), first_(first) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("contextual_length", &contextual_length_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("attention_window", &attention_window_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("min_full_length", &min_full_length_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("position", &position_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time", &time_));
    OP_REQUIRES(ctx, time_ == "none" || time_ == "buckets",
                absl::UnimplementedError(absl::StrCat("time = '", time_, "' is not there on a GPU, only 'none' and ",
                                                      "'buckets'. Place the layer on the CPU with tf.device.")));
  }

 protected:
  // Checks all inputs but grads.
  absl::Status Read(OpKernelContext* ctx, FusedrecAttention* call) const {
    const Tensor &query = ctx->input(first_), &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    const Tensor &splits = ctx->input(first_ + 3), &targets = ctx->input(first_ + 4), &scale = ctx->input(first_ + 5);
    const char* names[] = {"query", "key", "value"};
    for (int i = 0; i < 3; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first_ + i), 3));
    TF_RETURN_IF_ERROR(RequireTokens(Dims(query), Dims(key), Dims(value)));
    *call = {};
    call->type = NumberTypeOf<T>();
    call->tokens = query.dim_size(0);
    call->heads = query.dim_size(1);
    call->qk_dim = query.dim_size(2);
    call->value_dim = value.dim_size(2);
    TF_RETURN_IF_ERROR(RequireSize("the number of tokens", call->tokens));
    if (std::max(call->qk_dim, call->value_dim) > kAttentionMaxDim) {
      return absl::InvalidArgumentError(absl::StrCat("heads must have at most ", kAttentionMaxDim,
                                                     " columns on a GPU, got ", call->qk_dim, " and ", call->value_dim,
                                                     ". Use more heads."));
    }
    TF_RETURN_IF_ERROR(RequireRank("row_splits", splits, 1));
    TF_RETURN_IF_ERROR(RequireSplits("row_splits", In<int64_t>(splits), call->tokens));
    call->row_splits = In<int64_t>(splits).data();
    call->batch = splits.NumElements() - 1;
    if (targets_) {
      TF_RETURN_IF_ERROR(RequireRank("num_targets", targets, 1));
      TF_RETURN_IF_ERROR(RequireTargets(In<int64_t>(splits), In<int64_t>(targets)));
      call->num_targets = In<int64_t>(targets).data();
    }
    TF_RETURN_IF_ERROR(RequireScale(Dims(scale), call->tokens));
    call->scale = In<float>(scale).data();
    call->scale_stride = scale.dims();
    call->alpha = alpha_;
    call->contextual_length = contextual_length_;
    call->attention_window = attention_window_;
    call->min_full_length = min_full_length_;
    call->query = query.data();
    call->key = key.data();
    call->value = value.data();
    return ReadBias(ctx, call);
  }

  // Memory for the launcher, and its answer.
  template <typename Launcher>
  static absl::Status Launch(OpKernelContext* ctx, const char* name, const FusedrecAttention& call,
                             const Launcher& launcher) {
    Tensor scratch;
    TF_RETURN_IF_ERROR(AllocateScratch(ctx, fusedrec_jagged_attention_scratch_bytes(&call), &scratch));
    return CudaStatus(name, launcher(&call, scratch.data(), StreamOf(ctx)));
  }

  bool position() const { return position_; }
  bool has_time() const { return time_ == "buckets"; }

 private:
  absl::Status ReadBias(OpKernelContext* ctx, FusedrecAttention* call) const {
    const char* names[] = {"position_weights", "time_weights", "thresholds", "asks", "answers"};
    const int first = first_ + 6;
    for (int i = 0; i < 5; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first + i), 1));
    if (position_) {
      const int64_t size = ctx->input(first).NumElements();
      TF_RETURN_IF_ERROR(RequirePositionWeights(In<int64_t>(ctx->input(first_ + 3)), size));
      TF_RETURN_IF_ERROR(RequireSize("the size of position_weights", size));
      call->max_length = (size + 1) / 2;
      call->position_weights = In<float>(ctx->input(first)).data();
    }
    call->num_thresholds = -1;
    if (!has_time()) return absl::OkStatus();
    RelativeBias bias;  // of which only sizes and thresholds are read: the rest is on the device
    bias.time = TimeMap::kBuckets;
    bias.time_weights = In<float>(ctx->input(first + 1));
    bias.thresholds = In<int64_t>(ctx->input(first + 2));
    bias.asks = In<int64_t>(ctx->input(first + 3));
    bias.answers = In<int64_t>(ctx->input(first + 4));
    TF_RETURN_IF_ERROR(RequireTime(bias, call->tokens));
    call->num_thresholds = bias.thresholds.size();
    if (call->num_thresholds > kAttentionMaxThresholds) {
      return absl::InvalidArgumentError(absl::StrCat("thresholds must be at most ", kAttentionMaxThresholds,
                                                     " on a GPU, got ", call->num_thresholds, "."));
    }
    call->time_weights = bias.time_weights.data();
    call->thresholds = bias.thresholds.data();
    call->asks = bias.asks.data();
    call->answers = bias.answers.data();
    return absl::OkStatus();
  }

  static std::vector<int64_t> Dims(const Tensor& t) {
    const auto dims = t.shape().dim_sizes();
    return {dims.begin(), dims.end()};
  }

  const int first_;
  float alpha_;
  int64_t contextual_length_, attention_window_, min_full_length_;
  bool targets_, position_;
  std::string time_;
};

template <typename T>
class JaggedAttentionGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit JaggedAttentionGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 0) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    Tensor* out;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(2).shape(), &out));
    if (out->NumElements() == 0) return;
    call.out = out->data();
    OP_REQUIRES_OK(ctx, this->Launch(ctx, "jagged_attention", call, fusedrec_jagged_attention));
  }
};

template <typename T>
class JaggedAttentionGradGpuOp : public JaggedAttentionGpuBase<T> {
 public:
  explicit JaggedAttentionGradGpuOp(OpKernelConstruction* ctx) : JaggedAttentionGpuBase<T>(ctx, 1) {}

  void Compute(OpKernelContext* ctx) override {
    FusedrecAttention call;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &call));
    OP_REQUIRES(ctx, ctx->input(0).shape() == ctx->input(3).shape(),
                absl::InvalidArgumentError(absl::StrCat("grads must have the shape of value ",
                                                        ctx->input(3).shape().DebugString(), ", got ",
                                                        ctx->input(0).shape().DebugString(),
                                                        ". Pass the gradient of JaggedAttention's output.")));
    const int inputs[] = {1, 2, 3, 7, 8};  // query, key, value, position_weights, time_weights
    Tensor* outputs[5];
    for (int i = 0; i < 5; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, ctx->input(inputs[i]).shape(), &outputs[i]));
    }
    // What has no part in the bias has no gradient; nor has anything where there are no heads.
    for (int i = 0; i < 5; ++i) {
      if (call.heads > 0 && (i < 3 || (i == 3 && this->position()) || (i == 4 && this->has_time()))) continue;
      OP_REQUIRES_OK(ctx, CudaStatus("fill", fusedrec_fill_zeros(outputs[i]->data(), outputs[i]->TotalBytes(),
                                                                 StreamOf(ctx))));
    }
    if (call.heads == 0) return;
    call.grads = ctx->input(0).data();
    call.query_grads = outputs[0]->data();
    call.key_grads = outputs[1]->data();
    call.value_grads = outputs[2]->data();
    call.position_grads = outputs[3]->flat<float>().data();
    call.time_grads = outputs[4]->flat<float>().data();
    OP_REQUIRES_OK(ctx, this->Launch(ctx, "jagged_attention_grad", call, fusedrec_jagged_attention_grad));
  }
};

#define FUSEDREC_REGISTER(T)                                                                      \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedAttention")                                        \
                              .Device(DEVICE_GPU)                                                 \
                              .TypeConstraint<T>("T")                                             \
                              .HostMemory("row_splits")                                           \
                              .HostMemory("num_targets")                                          \
                              .HostMemory("thresholds"),                                          \
                          JaggedAttentionGpuOp<T>);                                               \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>JaggedAttentionGrad")                                    \
                              .Device(DEVICE_GPU)                                                 \
                              .TypeConstraint<T>("T")                                             \
                              .HostMemory("row_splits")                                           \
                              .HostMemory("num_targets")                                          \
                              .HostMemory("thresholds"),                                          \
                          JaggedAttentionGradGpuOp<T>);
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER

}  // namespace fusedrec
