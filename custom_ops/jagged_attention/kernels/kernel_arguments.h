// Helpers of the kernels: they read and check arguments, and make float32 copies of 16-bit tensors.
#pragma once

#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "common/kernel_util.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_attention/validation.h"

namespace fusedrec {

inline std::vector<int64_t> DimsOf(const tensorflow::Tensor& t) {
  const auto dims = t.shape().dim_sizes();
  return {dims.begin(), dims.end()};
}

// Input 0 of a gradient op. `op`: whose output has this shape.
inline absl::Status RequireGrads(const tensorflow::Tensor& grads, const tensorflow::TensorShape& shape, const char* op) {
  if (grads.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("grads must have shape ", shape.DebugString(), ", got ",
                                                 grads.shape().DebugString(), ". Pass the gradient of ", op,
                                                 "'s output."));
}

// The attention that GatedAttention returned.
inline absl::Status RequireAttended(const tensorflow::Tensor& attended, const tensorflow::TensorShape& shape) {
  if (attended.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("attended must have shape ", shape.DebugString(), ", got ",
                                                 attended.shape().DebugString(),
                                                 ". Pass the second output of GatedAttention."));
}

// Attributes of the gate, and its inputs from `first` on: gate, norm_weight, norm_bias.
class GateArguments {
 public:
  explicit GateArguments(tensorflow::OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("per_head", &per_head_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gate_first", &gate_first_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon_));
  }

  // shape: of the attention [Tq, H, Dv]. Reads sizes only.
  absl::Status Check(tensorflow::OpKernelContext* ctx, int first, const tensorflow::TensorShape& shape) const {
    if (ctx->input(first).shape() != shape) {
      return absl::InvalidArgumentError(absl::StrCat("gate must have the shape of the attention ", shape.DebugString(),
                                                     ", got ", ctx->input(first).shape().DebugString(),
                                                     ". Pass one number per query token, head and column."));
    }
    const char* names[] = {"norm_weight", "norm_bias"};
    const int64_t columns = shape.dim_size(1) * shape.dim_size(2), weights = ctx->input(first + 1).NumElements();
    for (int i = 0; i < 2; ++i) {
      const tensorflow::Tensor& given = ctx->input(first + 1 + i);
      TF_RETURN_IF_ERROR(RequireRank(names[i], given, 1));
      const int64_t size = given.NumElements();
      if (size == weights && (size == 0 || size == columns)) continue;
      return absl::InvalidArgumentError(absl::StrCat(names[i], " must have one entry per column of all heads, that is ",
                                                     columns, ", got ", size,
                                                     ". Pass weight and bias of the norm, or neither."));
    }
    return absl::OkStatus();
  }

  GateInputs Inputs(tensorflow::OpKernelContext* ctx, int first, const float* gate) const {
    return {gate, In<float>(ctx->input(first + 1)), In<float>(ctx->input(first + 2)), per_head_, gate_first_, epsilon_};
  }

 private:
  bool per_head_ = false, gate_first_ = false;
  float epsilon_ = 0.0f;
};

// query_splits of an op, or nullptr where every token asks.
inline absl::Status QuerySplits(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor** splits) {
  tensorflow::OpInputList list;
  TF_RETURN_IF_ERROR(ctx->input_list("query_splits", &list));
  *splits = list.size() == 0 ? nullptr : &list[0];
  if (list.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("query_splits must be one tensor, got ", list.size(), "."));
  }
  return list.size() == 0 ? absl::OkStatus() : RequireRank("query_splits", list[0], 1);
}

// The attributes of all ops of this folder, and their inputs from row_splits on except `scale`.
class BiasAndRows {
 public:
  explicit BiasAndRows(tensorflow::OpKernelConstruction* ctx) {
    std::string time;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("attention_window", &rows_.attention_window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("min_full_length", &rows_.min_full_length));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("global_window", &rows_.global_window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("target_group_size", &rows_.target_group_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("position", &position_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time", &time));
    if (ctx->HasAttr("dropout")) OP_REQUIRES_OK(ctx, ctx->GetAttr("dropout", &dropout_));
    OP_REQUIRES(ctx, dropout_ >= 0 && dropout_ < 1,
                absl::InvalidArgumentError(absl::StrCat("dropout must be >= 0 and < 1, got ", dropout_, ".")));
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

  // row_splits and num_targets at inputs `first` and `first + 1`, contextual_lengths and query_splits by their names.
  absl::Status Rows(tensorflow::OpKernelContext* ctx, int first, int64_t tokens, int64_t heads,
                    JaggedRows* rows) const {
    const tensorflow::Tensor &splits = ctx->input(first), &targets = ctx->input(first + 1);
    const tensorflow::Tensor *contexts, *queries;
    TF_RETURN_IF_ERROR(ctx->input("contextual_lengths", &contexts));
    TF_RETURN_IF_ERROR(QuerySplits(ctx, &queries));
    *rows = rows_;
    rows->heads = heads;
    TF_RETURN_IF_ERROR(RequireRank("row_splits", splits, 1));
    rows->row_splits = In<int64_t>(splits);
    TF_RETURN_IF_ERROR(RequireSplits("row_splits", rows->row_splits, tokens));
    TF_RETURN_IF_ERROR(RequireRank("contextual_lengths", *contexts, 1));
    rows->contextual_lengths = In<int64_t>(*contexts);
    TF_RETURN_IF_ERROR(RequireContext(rows->row_splits, rows->contextual_lengths));
    if (queries != nullptr) {
      rows->query_splits = In<int64_t>(*queries);
      // Before RequireQueries, whose differences of wild splits would overflow.
      const int64_t total = rows->query_splits.empty() ? 0 : rows->query_splits.back();
      TF_RETURN_IF_ERROR(RequireSplits("query_splits", rows->query_splits, total));
      TF_RETURN_IF_ERROR(RequireQueries(rows->row_splits, rows->query_splits));
    }
    if (dropout_ > 0) TF_RETURN_IF_ERROR(Dropout(ctx, rows));
    if (!targets_) return absl::OkStatus();
    TF_RETURN_IF_ERROR(RequireRank("num_targets", targets, 1));
    rows->num_targets = In<int64_t>(targets);
    return RequireTargets(rows->row_splits, rows->queries(), rows->num_targets);
  }

  // The five inputs from `first` on: position_weights, time_weights, thresholds, asks, answers.
  absl::Status Bias(tensorflow::OpKernelContext* ctx, int first, const JaggedRows& rows, RelativeBias* bias) const {
    const char* names[] = {"position_weights", "time_weights", "thresholds", "asks", "answers"};
    for (int i = 0; i < 5; ++i) TF_RETURN_IF_ERROR(RequireRank(names[i], ctx->input(first + i), 1));
    if (position_) {
      bias->position_weights = In<float>(ctx->input(first));
      TF_RETURN_IF_ERROR(RequirePositionWeights(rows.row_splits, bias->position_weights.size()));
    }
    bias->time = time_;
    if (time_ == TimeMap::kNone) return absl::OkStatus();
    bias->time_weights = In<float>(ctx->input(first + 1));
    bias->thresholds = In<int64_t>(ctx->input(first + 2));
    bias->asks = In<int64_t>(ctx->input(first + 3));
    bias->answers = In<int64_t>(ctx->input(first + 4));
    return RequireTime(*bias, rows.queries().back(), rows.row_splits.back());
  }

 private:
  absl::Status Dropout(tensorflow::OpKernelContext* ctx, JaggedRows* rows) const {
    tensorflow::OpInputList seeds;
    TF_RETURN_IF_ERROR(ctx->input_list("dropout_seed", &seeds));
    if (seeds.size() != 1 || seeds[0].dims() != 0) {
      return absl::InvalidArgumentError(absl::StrCat("dropout_seed must be one <int64>[] with dropout = ", dropout_,
                                                     ", got ", seeds.size(), " tensors",
                                                     seeds.size() == 1 ? " that is no scalar." : "."));
    }
    const uint64_t seed = static_cast<uint64_t>(seeds[0].scalar<int64_t>()());
    const auto mix = [](uint32_t x) {  // as MixBits of engine_masks.inc.h
      x = (x ^ (x >> 16)) * 0x7feb352du;
      x = (x ^ (x >> 15)) * 0x846ca68bu;
      return x ^ (x >> 16);
    };
    rows->pair_seed = mix(static_cast<uint32_t>(seed) ^ mix(static_cast<uint32_t>(seed >> 32)));
    rows->dropped = static_cast<uint32_t>(static_cast<double>(dropout_) * 2147483648.0);
    return absl::OkStatus();
  }

  JaggedRows rows_;
  float dropout_ = 0;
  bool targets_ = false, position_ = false;
  TimeMap time_ = TimeMap::kNone;
};

// A tensor as float32. A float32 tensor is not copied.
template <typename T>
class Widened {
 public:
  absl::Status Widen(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& t) {
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
  tensorflow::Tensor wide_;
  const float* data_ = nullptr;
};

// An output that is computed in float32 and rounded once.
template <typename T>
class Rounded {
 public:
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, int index, const tensorflow::TensorShape& shape) {
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

  void Round(tensorflow::OpKernelContext* ctx) {
    if constexpr (!std::is_same<T, float>::value) {
      const float* from = wide_.flat<float>().data();
      T* to = out_->flat<T>().data();
      CpuPool(ctx)(out_->NumElements(), 8, [from, to](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) to[n] = static_cast<T>(from[n]);
      });
    }
  }

 private:
  tensorflow::Tensor* out_ = nullptr;
  tensorflow::Tensor wide_;
};

inline const TileEngine& BestEngine() {
  static const TileEngine* const best = Engines().front();
  return *best;
}

// Allocates the gradients of position_weights and time_weights, inputs `first` and `first + 1`. A part of the bias that the
// op lacks has a gradient of 0.
inline absl::Status AllocateBiasGrads(tensorflow::OpKernelContext* ctx, int first, int first_output,
                                      const BiasAndRows& options, BiasGrads* grads) {
  tensorflow::Tensor *position, *time;
  TF_RETURN_IF_ERROR(ctx->allocate_output(first_output, ctx->input(first).shape(), &position));
  TF_RETURN_IF_ERROR(ctx->allocate_output(first_output + 1, ctx->input(first + 1).shape(), &time));
  position->flat<float>().setZero();
  time->flat<float>().setZero();
  if (options.position()) grads->position_weights = Out<float>(position);
  if (options.time() != TimeMap::kNone) grads->time_weights = Out<float>(time);
  return absl::OkStatus();
}

}  // namespace fusedrec
