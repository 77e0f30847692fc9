#include <map>
#include <string>

#include "common/kernel_util.h"
#include "jagged_attention/jagged_attention.h"
#include "jagged_attention/validation.h"

namespace fusedrec {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

absl::Span<const float> Floats(const Tensor& t) { return In<float>(t); }

// Attributes of all ops of this folder, and their inputs from row_splits on without `scale`.
class BiasAndRows {
 public:
  explicit BiasAndRows(OpKernelConstruction* ctx) {
    std::string time;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("contextual_length", &rows_.contextual_length));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("attention_window", &rows_.attention_window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("min_full_length", &rows_.min_full_length));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("position", &position_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time", &time));
    const std::map<std::string, TimeMap> maps = {{"none", TimeMap::kNone},
                                                 {"buckets", TimeMap::kBuckets},
                                                 {"power", TimeMap::kPower},
                                                 {"exponential", TimeMap::kExponential},
                                                 {"stretched", TimeMap::kStretched}};
    time_ = maps.at(time);
  }

  bool position() const { return position_; }
  TimeMap time() const { return time_; }
  int64_t channels() const { return (position_ ? 1 : 0) + (time_ == TimeMap::kNone ? 0 : 1); }

  // row_splits and num_targets at inputs `first` and `first + 1`.
  absl::Status Rows(OpKernelContext* ctx, int first, int64_t tokens, int64_t heads, JaggedRows* rows) const {
    const Tensor &splits = ctx->input(first), &targets = ctx->input(first + 1);
    *rows = rows_;
    rows->heads = heads;
    TF_RETURN_IF_ERROR(RequireRank("row_splits", splits, 1));
    rows->row_splits = In<int64_t>(splits);
    TF_RETURN_IF_ERROR(RequireSplits("row_splits", rows->row_splits, tokens));
    if (!targets_) return absl::OkStatus();
    TF_RETURN_IF_ERROR(RequireRank("num_targets", targets, 1));
    rows->num_targets = In<int64_t>(targets);
    return RequireTargets(rows->row_splits, rows->num_targets);
  }

  // The five inputs from `first` on: position_weights, time_weights, thresholds, asks, answers.
  absl::Status Bias(OpKernelContext* ctx, int first, const JaggedRows& rows, RelativeBias* bias) const {
    const char* names[] = {"position_weights", "time_weights", "thresholds", "asks", "answers"};
    for (int i = 0; i < 5; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first + i), 1));
    if (position_) {
      bias->position_weights = Floats(ctx->input(first));
      TF_RETURN_IF_ERROR(RequirePositionWeights(rows.row_splits, bias->position_weights.size()));
    }
    bias->time = time_;
    if (time_ == TimeMap::kNone) return absl::OkStatus();
    bias->time_weights = Floats(ctx->input(first + 1));
    bias->thresholds = In<int64_t>(ctx->input(first + 2));
    bias->asks = In<int64_t>(ctx->input(first + 3));
    bias->answers = In<int64_t>(ctx->input(first + 4));
    return RequireTime(*bias, rows.row_splits.back());
  }

 private:
  JaggedRows rows_;
  bool targets_ = false, position_ = false;
  TimeMap time_ = TimeMap::kNone;
};

// float32 of a tensor, which is itself where it is that already.
template <typename T>
class Widened {
 public:
  absl::Status Widen(OpKernelContext* ctx, const Tensor& t) {
    if constexpr (std::is_same<T, float>::value) {
      data_ = t.flat<float>().data();
    } else {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_FLOAT, t.shape(), &wide_));
      const T* from = t.flat<T>().data();
      float* to = wide_.flat<float>().data();
      CpuPool(ctx)(t.NumElements(), 4, [from, to](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) to[n] = static_cast<float>(from[n]);
      });
      data_ = to;
    }
    return absl::OkStatus();
  }
  const float* data() const { return data_; }

 private:
  Tensor wide_;
  const float* data_ = nullptr;
};

// An output that is computed in float32 and rounded once.
template <typename T>
class Rounded {
 public:
  absl::Status Allocate(OpKernelContext* ctx, int index, const TensorShape& shape) {
    TF_RETURN_IF_ERROR(ctx->allocate_output(index, shape, &out_));
    if (std::is_same<T, float>::value) return absl::OkStatus();
    return ctx->allocate_temp(tensorflow::DT_FLOAT, shape, &wide_);
  }

  float* data() {
    if constexpr (std::is_same<T, float>::value) {
      return out_->flat<float>().data();
    } else {
      return wide_.flat<float>().data();
    }
  }

  void Round(OpKernelContext* ctx) {
    if constexpr (!std::is_same<T, float>::value) {
      const float* from = wide_.flat<float>().data();
      T* to = out_->flat<T>().data();
      CpuPool(ctx)(out_->NumElements(), 8, [from, to](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) to[n] = static_cast<T>(from[n]);
      });
    }
  }

 private:
  Tensor* out_ = nullptr;
  Tensor wide_;
};

const TileEngine& BestEngine() {
  static const TileEngine* const best = Engines().front();
  return *best;
}

// Gradients of position_weights and time_weights (inputs `first`, `first + 1`), of the bias that is there.
absl::Status AllocateBiasGrads(OpKernelContext* ctx, int first, int first_output, const BiasAndRows& options,
                               BiasGrads* grads) {
  Tensor *position, *time;
  TF_RETURN_IF_ERROR(ctx->allocate_output(first_output, ctx->input(first).shape(), &position));
  TF_RETURN_IF_ERROR(ctx->allocate_output(first_output + 1, ctx->input(first + 1).shape(), &time));
  position->flat<float>().setZero();
  time->flat<float>().setZero();
  if (options.position()) grads->position_weights = Out<float>(position);
  if (options.time() != TimeMap::kNone) grads->time_weights = Out<float>(time);
  return absl::OkStatus();
}

}  // namespace

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
  };

  absl::Status Read(OpKernelContext* ctx, Call* call) const {
    const Tensor &query = ctx->input(first_), &key = ctx->input(first_ + 1), &value = ctx->input(first_ + 2);
    TF_RETURN_IF_ERROR(RequireRank("query", query, 3));
    TF_RETURN_IF_ERROR(RequireRank("key", key, 3));
    TF_RETURN_IF_ERROR(RequireRank("value", value, 3));
    TF_RETURN_IF_ERROR(RequireTokens(Dims(query), Dims(key), Dims(value)));
    const int64_t tokens = query.dim_size(0);
    TF_RETURN_IF_ERROR(options_.Rows(ctx, first_ + 3, tokens, query.dim_size(1), &call->rows));
    const Tensor& scale = ctx->input(first_ + 5);
    TF_RETURN_IF_ERROR(RequireScale(Dims(scale), tokens));
    TF_RETURN_IF_ERROR(options_.Bias(ctx, first_ + 6, call->rows, &call->bias));
    TF_RETURN_IF_ERROR(call->query.Widen(ctx, query));
    TF_RETURN_IF_ERROR(call->key.Widen(ctx, key));
    TF_RETURN_IF_ERROR(call->value.Widen(ctx, value));
    call->inputs = {call->query.data(), call->key.data(), call->value.data(), query.dim_size(2),
                    value.dim_size(2),  alpha_,           Floats(scale),      scale.dims() == 1};
    return absl::OkStatus();
  }

  static std::vector<int64_t> Dims(const Tensor& t) {
    const auto dims = t.shape().dim_sizes();
    return {dims.begin(), dims.end()};
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
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, 0, ctx->input(2).shape()));
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
    OP_REQUIRES(ctx, ctx->input(0).shape() == ctx->input(3).shape(),
                absl::InvalidArgumentError(absl::StrCat("grads must have the shape of value ",
                                                        ctx->input(3).shape().DebugString(), ", got ",
                                                        ctx->input(0).shape().DebugString(),
                                                        ". Pass the gradient of JaggedAttention's output.")));
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

template <typename T>
class JaggedBiasAttentionOp : public OpKernel {
 public:
  explicit JaggedBiasAttentionOp(OpKernelConstruction* ctx) : OpKernel(ctx), options_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& value = ctx->input(0);
    JaggedRows rows;
    RelativeBias bias;
    OP_REQUIRES_OK(ctx, RequireRank("value", value, 3));
    OP_REQUIRES_OK(ctx, options_.Rows(ctx, 1, value.dim_size(0), value.dim_size(1), &rows));
    OP_REQUIRES_OK(ctx, options_.Bias(ctx, 3, rows, &bias));
    Widened<T> wide;
    OP_REQUIRES_OK(ctx, wide.Widen(ctx, value));
    TensorShape shape = value.shape();
    shape.set_dim(2, options_.channels() * value.dim_size(2));
    Rounded<T> out;
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, 0, shape));
    JaggedBiasAttention(rows, wide.data(), value.dim_size(2), bias, BestEngine(), CpuPool(ctx), out.data());
    out.Round(ctx);
  }

 private:
  const BiasAndRows options_;
};

template <typename T>
class JaggedBiasAttentionGradOp : public OpKernel {
 public:
  explicit JaggedBiasAttentionGradOp(OpKernelConstruction* ctx) : OpKernel(ctx), options_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &value = ctx->input(1);
    JaggedRows rows;
    RelativeBias bias;
    OP_REQUIRES_OK(ctx, RequireRank("value", value, 3));
    OP_REQUIRES_OK(ctx, options_.Rows(ctx, 2, value.dim_size(0), value.dim_size(1), &rows));
    OP_REQUIRES_OK(ctx, options_.Bias(ctx, 4, rows, &bias));
    TensorShape shape = value.shape();
    shape.set_dim(2, options_.channels() * value.dim_size(2));
    OP_REQUIRES(ctx, grads.shape() == shape,
                absl::InvalidArgumentError(absl::StrCat("grads must have shape ", shape.DebugString(), ", got ",
                                                        grads.shape().DebugString(),
                                                        ". Pass the gradient of JaggedBiasAttention's output.")));
    Widened<T> wide_value, wide_grads;
    OP_REQUIRES_OK(ctx, wide_value.Widen(ctx, value));
    OP_REQUIRES_OK(ctx, wide_grads.Widen(ctx, grads));
    Rounded<T> value_grads;
    OP_REQUIRES_OK(ctx, value_grads.Allocate(ctx, 0, value.shape()));
    BiasGrads bias_grads;
    OP_REQUIRES_OK(ctx, AllocateBiasGrads(ctx, 4, 1, options_, &bias_grads));
    JaggedBiasAttentionGrad(rows, wide_value.data(), value.dim_size(2), bias, wide_grads.data(), BestEngine(),
                            CpuPool(ctx), value_grads.data(), bias_grads);
    value_grads.Round(ctx);
  }

 private:
  const BiasAndRows options_;
};

#define FUSEDREC_REGISTER_KERNEL(op, T) \
  REGISTER_KERNEL_BUILDER(Name("Fusedrec>" #op).Device(DEVICE_CPU).TypeConstraint<T>("T"), op##Op<T>);
#define FUSEDREC_REGISTER(T)                              \
  FUSEDREC_REGISTER_KERNEL(JaggedAttention, T)            \
  FUSEDREC_REGISTER_KERNEL(JaggedAttentionGrad, T)        \
  FUSEDREC_REGISTER_KERNEL(JaggedBiasAttention, T)        \
  FUSEDREC_REGISTER_KERNEL(JaggedBiasAttentionGrad, T)
FUSEDREC_REGISTER(float)
FUSEDREC_REGISTER(Eigen::half)
FUSEDREC_REGISTER(Eigen::bfloat16)
#undef FUSEDREC_REGISTER
#undef FUSEDREC_REGISTER_KERNEL

}  // namespace fusedrec
