// The kernel of the attention ops for both devices: reads and checks a call, makes its outputs, runs it.
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "common/gpu_kernel_util.h"
#include "jagged_attention/cpu/jagged_attention.h"
#include "jagged_attention/cuda/jagged_attention_cuda.h"

namespace fusedrec {
namespace {

#include "jagged_attention/visibility.inc.h"

const Tensor& Input(OpKernelContext* ctx, const char* name) {
  const Tensor* tensor;
  TF_CHECK_OK(ctx->input(name, &tensor));
  return *tensor;
}

absl::Status OptionalInput(OpKernelContext* ctx, const char* name, const Tensor** tensor) {
  tensorflow::OpInputList list;
  FUSEDREC_TRY(ctx->input_list(name, &list));
  if (list.size() > 1) return Invalid(name, " must be one tensor, got ", list.size(), ".");
  *tensor = list.size() == 0 ? nullptr : &list[0];
  return absl::OkStatus();
}

template <typename T>
const T* DataOf(const Tensor& tensor) {
  return tensor.NumElements() == 0 ? nullptr : tensor.flat<T>().data();
}

// per: what has one entry each, `wanted` in all.
absl::Status RequireEntries(const char* name, const char* per, int64_t wanted, int64_t entries, const char* remedy = "") {
  if (entries == wanted) return absl::OkStatus();
  return Invalid(name, " must have one ", per, ", that is ", wanted, ", got ", entries, ".", remedy);
}

absl::Status CheckQueries(const AttentionCall<void>& call, int64_t entries) {
  FUSEDREC_TRY(RequireEntries("query_splits", "entry per entry of row_splits", call.batch + 1, entries,
                              " A row without queries has an empty range."));
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t length = RowLength(call, b), queries = length - FirstQuery(call, b);
    if (queries > length) {
      return Invalid("query_splits must give row ", b, " at most one query per token, that is ", length, ", got ", queries,
                     ". The queries of a row are its last tokens, which have keys and values, too.");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTargets(const AttentionCall<void>& call, int64_t entries) {
  FUSEDREC_TRY(RequireEntries("num_targets", "entry per row", call.batch, entries));
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t length = RowLength(call, b), queries = length - FirstQuery(call, b), targets = call.num_targets[b];
    if (targets < 0 || targets > length) {
      return Invalid("num_targets[", b, "] must lie between 0 and the row's length ", length, ", got ", targets,
                     ". Targets are the last tokens of a row.");
    }
    if (targets > queries) {
      return Invalid("num_targets[", b, "] must be at most the row's queries ", queries, ", got ", targets,
                     ". Every target asks.");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckContext(const AttentionCall<void>& call, int64_t entries) {
  if (entries != 0) {
    FUSEDREC_TRY(RequireEntries("contextual_length", "entry per row", call.batch, entries,
                                " Pass a number for the same length in all rows."));
  }
  for (int64_t b = 0; b < entries; ++b) {
    if (call.contextual_lengths[b] < 0) {
      return Invalid("contextual_length[", b, "] must be >= 0, got ", call.contextual_lengths[b],
                     ". Use 0 for a row without context.");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPosition(const AttentionCall<void>& call, int64_t entries) {
  if (entries % 2 == 0) {
    return Invalid("position_weights must have 2N - 1 entries for rows of up to N tokens, got ", entries,
                   ". Entry N - 1 is of distance 0.");
  }
  for (int64_t b = 0; b < call.batch; ++b) {
    if (RowLength(call, b) <= call.bias.max_length) continue;
    return Invalid("row ", b, " has ", RowLength(call, b), " tokens, longer than N = ", call.bias.max_length,
                   " of position_weights [2N - 1]. Trim it, or raise N.");
  }
  return absl::OkStatus();
}

absl::Status CheckTime(const RelativeBias& bias, int64_t entries) {
  const char* const of_function = "entry per parameter of this function of time";
  const char* const per = bias.time == TimeMap::kBuckets ? "entry more than thresholds" : of_function;
  FUSEDREC_TRY(RequireEntries("time_weights", per, NumTimeWeights(bias), entries));
  for (int32_t g = 1; g < bias.num_thresholds; ++g) {
    if (bias.thresholds[g] < bias.thresholds[g - 1]) {
      return Invalid("thresholds must not decrease, got ", bias.thresholds[g - 1], " then ", bias.thresholds[g],
                     " at entry ", g, ". Sort them.");
    }
  }
  return absl::OkStatus();
}

class AttentionBase : public tensorflow::OpKernel {
 public:
  explicit AttentionBase(OpKernelConstruction* ctx)
      : OpKernel(ctx), op_(absl::StripSuffix(absl::StripPrefix(type_string_view(), "Fusedrec>"), "Grad")),
        backward_(absl::EndsWith(type_string_view(), "Grad")) {
    const char* const times[] = {"none", "buckets", "power", "exponential", "stretched"};  // as TimeMap
    std::string time;
    bool per_head, gate_first;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("attention_window", &form_.attention_window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("min_full_length", &form_.min_full_length));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("global_window", &form_.global_window));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("target_group_size", &form_.target_group_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("position", &position_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("time", &time));
    form_.bias.time = static_cast<TimeMap>(std::find(times, std::end(times), time) - times);
    attends_ = ctx->HasAttr("alpha");
    if (!attends_) {
      form_.channels = (position_ ? 1 : 0) + (form_.bias.time == TimeMap::kNone ? 0 : 1);
      return;
    }
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_gates", &gates_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &form_.alpha));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &form_.epsilon));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("per_head", &per_head));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gate_first", &gate_first));
    form_.per_head = per_head;
    form_.gate_first = gate_first;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dropout", &dropout_));
    OP_REQUIRES(ctx, dropout_ >= 0 && dropout_ < 1, Invalid("dropout must be >= 0 and < 1, got ", dropout_, "."));
  }

 protected:
  // Reads and checks all inputs but grads and attended; of tensors on a GPU, sizes alone. out: the shape of the attention.
  absl::Status Read(OpKernelContext* ctx, bool on_gpu, AttentionCall<void>* call, TensorShape* out) const {
    *call = form_;
    const Tensor *query_splits, &value = Input(ctx, "value");
    FUSEDREC_TRY(OptionalInput(ctx, "query_splits", &query_splits));
    if (query_splits != nullptr) FUSEDREC_TRY(RequireRank("query_splits", *query_splits, 1));
    if (attends_) FUSEDREC_TRY(ReadTokens(ctx, query_splits != nullptr, call));
    FUSEDREC_TRY(RequireRank("value", value, 3));
    call->value = value.data();
    call->tokens = value.dim_size(0);
    call->heads = value.dim_size(1);
    call->value_dim = value.dim_size(2);
    if (on_gpu && attends_ && std::max(call->qk_dim, call->value_dim) > kAttentionMaxDim) {
      return Invalid("heads must have at most ", kAttentionMaxDim, " columns on a GPU, got ", call->qk_dim, " and ",
                     call->value_dim, ". Use more heads.");
    }
    if (on_gpu) FUSEDREC_TRY(RequireSize("the number of tokens", call->tokens));
    FUSEDREC_TRY(ReadRows(ctx, query_splits, call));
    if (attends_) FUSEDREC_TRY(ReadScaleAndDropout(ctx, call));
    FUSEDREC_TRY(ReadBias(ctx, on_gpu, call));
    *out = value.shape();
    out->set_dim(0, call->queries);
    if (attends_) return ReadGate(ctx, *out, call);
    out->set_dim(2, call->channels * call->value_dim);
    const bool checked = on_gpu && out->num_elements() > 0;
    return RequireSize("the number of columns of all heads and channels", checked ? call->heads * out->dim_size(2) : 0);
  }

  absl::Status MakeOut(OpKernelContext* ctx, const TensorShape& shape, AttentionCall<void>* call) const {
    Tensor* out;
    FUSEDREC_TRY(ctx->allocate_output(0, shape, &out));
    (gates_ == 0 ? call->out : call->gated) = out->data();
    if (gates_ == 0) return absl::OkStatus();
    FUSEDREC_TRY(ctx->allocate_output(1, shape, &out));
    call->out = out->data();
    return absl::OkStatus();
  }

  // zeros: gradients of inputs that have no part in the result.
  absl::Status MakeGradients(OpKernelContext* ctx, const TensorShape& shape, AttentionCall<void>* call,
                             std::vector<Tensor*>* zeros) const {
    const Tensor &grads = Input(ctx, "grads"), *attended = nullptr;
    if (grads.shape() != shape) {
      return Invalid("grads must have shape ", shape.DebugString(), ", got ", grads.shape().DebugString(),
                     ". Pass the gradient of ", op_, "'s output.");
    }
    call->grads = grads.data();
    int output = 0;
    const bool any = shape.num_elements() > 0;
    const auto gradient = [&](const Tensor& of, bool has_part, auto* array) -> absl::Status {
      Tensor* made;
      FUSEDREC_TRY(ctx->allocate_output(output++, of.shape(), &made));
      *array = static_cast<std::decay_t<decltype(*array)>>(made->data());
      if (!has_part || !any) zeros->push_back(made);
      return absl::OkStatus();
    };
    if (attends_) FUSEDREC_TRY(gradient(Input(ctx, "query"), true, &call->query_grads));
    if (attends_) FUSEDREC_TRY(gradient(Input(ctx, "key"), true, &call->key_grads));
    FUSEDREC_TRY(gradient(Input(ctx, "value"), true, &call->value_grads));
    FUSEDREC_TRY(gradient(Input(ctx, "position_weights"), position_, &call->position_grads));
    FUSEDREC_TRY(gradient(Input(ctx, "time_weights"), call->bias.time != TimeMap::kNone, &call->time_grads));
    if (gates_ == 0) return absl::OkStatus();
    FUSEDREC_TRY(OptionalInput(ctx, "attended", &attended));
    if (attended->shape() != shape) {
      return Invalid("attended must have shape ", shape.DebugString(), ", got ", attended->shape().DebugString(),
                     ". Pass the second output of JaggedAttention.");
    }
    call->out = attended->data();
    FUSEDREC_TRY(gradient(grads, true, &call->gate_grads));
    tensorflow::OpInputList norm;
    FUSEDREC_TRY(ctx->input_list("norm", &norm));
    if (norm.size() == 0) return absl::OkStatus();
    FUSEDREC_TRY(gradient(norm[0], true, &call->norm_weight_grads));
    return gradient(norm[1], true, &call->norm_bias_grads);
  }

  const std::string op_;
  const bool backward_;

 private:
  absl::Status ReadTokens(OpKernelContext* ctx, bool own_queries, AttentionCall<void>* call) const {
    const Tensor &query = Input(ctx, "query"), &key = Input(ctx, "key"), &value = Input(ctx, "value");
    const std::string of_query = query.shape().DebugString(), of_key = key.shape().DebugString();
    FUSEDREC_TRY(RequireRank("query", query, 3));
    FUSEDREC_TRY(RequireRank("key", key, 3));
    FUSEDREC_TRY(RequireRank("value", value, 3));
    if (own_queries && (key.dim_size(1) != query.dim_size(1) || key.dim_size(2) != query.dim_size(2))) {
      return Invalid("key must have the heads and columns of query ", of_query, ", got ", of_key,
                     ". With query_splits, only the number of tokens may differ.");
    }
    if (!own_queries && key.shape() != query.shape()) {
      return Invalid("key must have the shape of query ", of_query, ", got ", of_key,
                     ". Queries and keys need the same tokens, heads and columns; pass query_splits where the last tokens "
                     "of each row ask.");
    }
    if (value.dim_size(0) != key.dim_size(0) || value.dim_size(1) != key.dim_size(1)) {
      return Invalid("value must have the tokens and heads of ", own_queries ? "key " : "query ", of_key, ", got ",
                     value.shape().DebugString(), ". Only its last dimension may differ.");
    }
    call->query = query.data();
    call->key = key.data();
    call->queries = query.dim_size(0);
    call->qk_dim = query.dim_size(2);
    return absl::OkStatus();
  }

  absl::Status ReadRows(OpKernelContext* ctx, const Tensor* query_splits, AttentionCall<void>* call) const {
    const Tensor &splits = Input(ctx, "row_splits"), &contexts = Input(ctx, "contextual_lengths");
    FUSEDREC_TRY(RequireRank("row_splits", splits, 1));
    FUSEDREC_TRY(RequireSplits("row_splits", In<int64_t>(splits), call->tokens));
    call->row_splits = DataOf<int64_t>(splits);
    call->batch = splits.NumElements() - 1;
    FUSEDREC_TRY(RequireRank("contextual_lengths", contexts, 1));
    call->contextual_lengths = DataOf<int64_t>(contexts);
    FUSEDREC_TRY(CheckContext(*call, contexts.NumElements()));
    call->query_splits = call->row_splits;
    if (query_splits != nullptr) {
      const auto entries = In<int64_t>(*query_splits);
      // Before the differences of CheckQueries, which would overflow with wild splits.
      FUSEDREC_TRY(
          RequireSplits("query_splits", entries, attends_ ? call->queries : entries.empty() ? 0 : entries.back()));
      call->query_splits = entries.data();
      FUSEDREC_TRY(CheckQueries(*call, entries.size()));
    }
    call->queries = call->query_splits[call->batch];
    if (!targets_) return absl::OkStatus();
    const Tensor& targets = Input(ctx, "num_targets");
    FUSEDREC_TRY(RequireRank("num_targets", targets, 1));
    call->num_targets = DataOf<int64_t>(targets);
    return CheckTargets(*call, targets.NumElements());
  }

  absl::Status ReadScaleAndDropout(OpKernelContext* ctx, AttentionCall<void>* call) const {
    const Tensor& scale = Input(ctx, "scale");
    if (scale.dims() > 0 && (scale.dims() > 1 || scale.NumElements() != call->queries)) {
      return Invalid("scale must have shape [] or [", call->queries, "], one per query token, got ",
                     scale.shape().DebugString(), ". Pass 1 / N for the rule of the HSTU papers.");
    }
    call->scale = scale.flat<float>().data();
    call->scale_stride = scale.dims();
    if (dropout_ == 0) return absl::OkStatus();
    const Tensor* given;
    FUSEDREC_TRY(OptionalInput(ctx, "dropout_seed", &given));
    if (given == nullptr || given->dims() != 0) {
      return Invalid("dropout_seed must be one <int64>[] with dropout = ", dropout_, ", got ",
                     given == nullptr ? "none." : "shape " + given->shape().DebugString() + ".");
    }
    const uint64_t seed = static_cast<uint64_t>(given->scalar<int64_t>()());
    call->pair_seed = MixBits(static_cast<uint32_t>(seed) ^ MixBits(static_cast<uint32_t>(seed >> 32)));
    call->dropped = static_cast<uint32_t>(static_cast<double>(dropout_) * 2147483648.0);
    return absl::OkStatus();
  }

  absl::Status ReadBias(OpKernelContext* ctx, bool on_gpu, AttentionCall<void>* call) const {
    RelativeBias& bias = call->bias;
    for (const char* name : {"position_weights", "time_weights", "thresholds", "asks", "answers"}) {
      FUSEDREC_TRY(RequireRank(name, Input(ctx, name), 1));
    }
    if (position_) {
      const Tensor& weights = Input(ctx, "position_weights");
      bias.position_weights = DataOf<float>(weights);
      bias.max_length = (weights.NumElements() + 1) / 2;
      FUSEDREC_TRY(CheckPosition(*call, weights.NumElements()));
      if (on_gpu) FUSEDREC_TRY(RequireSize("the size of position_weights", weights.NumElements()));
    }
    if (bias.time == TimeMap::kNone) return absl::OkStatus();
    for (const auto& [name, tokens] : {std::pair("asks", call->queries), std::pair("answers", call->tokens)}) {
      FUSEDREC_TRY(RequireEntries(name, "time per token", tokens, Input(ctx, name).NumElements(),
                                  " Make both with sequence_times from timestamps that have the rows of the sequence."));
    }
    const Tensor &weights = Input(ctx, "time_weights"), &thresholds = Input(ctx, "thresholds");
    bias.asks = DataOf<int64_t>(Input(ctx, "asks"));
    bias.answers = DataOf<int64_t>(Input(ctx, "answers"));
    bias.time_weights = DataOf<float>(weights);
    bias.thresholds = DataOf<int64_t>(thresholds);
    bias.num_thresholds = static_cast<int32_t>(thresholds.NumElements());
    if (on_gpu && bias.num_thresholds > kAttentionMaxThresholds) {
      return Invalid("thresholds must be at most ", kAttentionMaxThresholds, " on a GPU, got ", bias.num_thresholds, ".");
    }
    return CheckTime(bias, weights.NumElements());
  }

  absl::Status ReadGate(OpKernelContext* ctx, const TensorShape& shape, AttentionCall<void>* call) const {
    const Tensor* gate;
    tensorflow::OpInputList norm;
    FUSEDREC_TRY(OptionalInput(ctx, "gate", &gate));
    FUSEDREC_TRY(ctx->input_list("norm", &norm));
    if (norm.size() != 0 && (gate == nullptr || norm.size() != 2)) {
      return Invalid("norm must be weight and bias of the norm behind a gate, got ", norm.size(), " tensors ",
                     gate == nullptr ? "without" : "with", " a gate.");
    }
    if (gate == nullptr) return absl::OkStatus();
    if (gate->shape() != shape) {
      return Invalid("gate must have the shape of the attention ", shape.DebugString(), ", got ",
                     gate->shape().DebugString(), ". Pass one number per query token, head and column.");
    }
    call->gate = gate->data();
    const int64_t columns = call->heads * call->value_dim;
    for (int i = 0; i < norm.size(); ++i) {
      const char* const name = i == 0 ? "norm_weight" : "norm_bias";
      FUSEDREC_TRY(RequireRank(name, norm[i], 1));
      FUSEDREC_TRY(RequireEntries(name, "entry per column of all heads", columns, norm[i].NumElements(),
                                  " Pass weight and bias of the norm, or neither."));
    }
    if (norm.size() == 0) return absl::OkStatus();
    call->norm_weight = norm[0].flat<float>().data();
    call->norm_bias = norm[1].flat<float>().data();
    return absl::OkStatus();
  }

  AttentionCall<void> form_{};  // what attributes say
  bool attends_, targets_, position_;
  int gates_ = 0;
  float dropout_ = 0;
};

// A call with its arrays of tokens in float32: 16-bit inputs are copied, and results are rounded once.
template <typename T>
class FloatCall {
 public:
  FloatCall(OpKernelContext* ctx, const AttentionCall<void>& call) : ctx_(ctx), pool_(CpuPool(ctx)) {
    std::memcpy(&call_, &call, sizeof(call));
  }

  absl::Status Run(bool backward) {
    static const TileEngine& engine = *Engines().front();
    if constexpr (!std::is_same_v<T, float>) FUSEDREC_TRY(Widen(backward));
    (backward ? AttentionBackward : AttentionForward)(call_, engine, pool_);
    for (const Result& result : results_) {
      pool_(result.size, 8, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) result.rounded[n] = static_cast<T>(result.exact[n]);
      });
    }
    return absl::OkStatus();
  }

 private:
  struct Result {
    const float* exact;
    T* rounded;
    int64_t size;
  };

  absl::Status Widen(bool backward) {
    const int64_t query = call_.queries * call_.heads * call_.qk_dim, key = call_.tokens * call_.heads * call_.qk_dim;
    const int64_t value = call_.tokens * call_.heads * call_.value_dim;
    const int64_t out = call_.queries * call_.heads * call_.value_dim * std::max(call_.channels, 1);
    FUSEDREC_TRY(Widen(query, &call_.query));
    FUSEDREC_TRY(Widen(key, &call_.key));
    FUSEDREC_TRY(Widen(value, &call_.value));
    FUSEDREC_TRY(Widen(out, &call_.gate));
    FUSEDREC_TRY(Widen(out, &call_.grads));
    FUSEDREC_TRY(backward ? Widen(out, &call_.out) : Round(out, &call_.out));
    FUSEDREC_TRY(Round(out, &call_.gated));
    FUSEDREC_TRY(Round(query, &call_.query_grads));
    FUSEDREC_TRY(Round(key, &call_.key_grads));
    FUSEDREC_TRY(Round(value, &call_.value_grads));
    return Round(out, &call_.gate_grads);
  }

  template <typename Number>
  absl::Status Widen(int64_t size, Number** array) {
    if (*array == nullptr) return absl::OkStatus();
    const T* const from = reinterpret_cast<const T*>(*array);
    float* to;
    FUSEDREC_TRY(Allocate(size, &to));
    pool_(size, 4, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) to[n] = static_cast<float>(from[n]);
    });
    *array = to;
    return absl::OkStatus();
  }

  absl::Status Round(int64_t size, float** array) {
    if (*array == nullptr) return absl::OkStatus();
    T* const rounded = reinterpret_cast<T*>(*array);
    FUSEDREC_TRY(Allocate(size, array));
    results_.push_back({*array, rounded, size});
    return absl::OkStatus();
  }

  absl::Status Allocate(int64_t size, float** array) {
    FUSEDREC_TRY(ctx_->allocate_temp(tensorflow::DT_FLOAT, TensorShape({size}), &memory_.emplace_back()));
    *array = memory_.back().flat<float>().data();
    return absl::OkStatus();
  }

  OpKernelContext* const ctx_;
  const ParallelFor pool_;
  AttentionCall<float> call_;
  std::vector<Tensor> memory_;
  std::vector<Result> results_;
};

template <On device, typename T>
class AttentionOp : public AttentionBase {
 public:
  using AttentionBase::AttentionBase;

  void Compute(OpKernelContext* ctx) override {
    AttentionCall<void> call;
    TensorShape shape;
    std::vector<Tensor*> zeros;
    OP_REQUIRES_OK(ctx, Read(ctx, device == On::kGpu, &call, &shape));
    OP_REQUIRES_OK(ctx, backward_ ? MakeGradients(ctx, shape, &call, &zeros) : MakeOut(ctx, shape, &call));
    call.type = NumberTypeOf<T>();
    if constexpr (device == On::kGpu) {
      Gpu gpu(ctx);  // allocates through itself
      for (Tensor* tensor : zeros) {
        OP_REQUIRES_OK(ctx, gpu.Check("fill", fusedrec_fill_zeros(tensor->data(), tensor->TotalBytes(), gpu.stream)));
      }
      if (shape.num_elements() == 0) return;
      const auto launch = backward_ ? fusedrec_attention_grad : fusedrec_attention;
      OP_REQUIRES_OK(ctx, gpu.Check(op_.c_str(), launch(&call, &gpu.memory, gpu.stream)));
    } else {
      for (Tensor* tensor : zeros) std::memset(tensor->data(), 0, tensor->TotalBytes());
      if (shape.num_elements() > 0) OP_REQUIRES_OK(ctx, FloatCall<T>(ctx, call).Run(backward_));
    }
  }
};

// The launchers read these inputs on the host.
#define FUSEDREC_ON_HOST                                                                                        \
  .HostMemory("row_splits").HostMemory("num_targets").HostMemory("contextual_lengths").HostMemory("query_splits") \
  .HostMemory("thresholds")
FUSEDREC_KERNEL_OF_ROWS("JaggedAttention", AttentionOp, FUSEDREC_ON_HOST.HostMemory("dropout_seed"));
FUSEDREC_KERNEL_OF_ROWS("JaggedAttentionGrad", AttentionOp, FUSEDREC_ON_HOST.HostMemory("dropout_seed"));
FUSEDREC_KERNEL_OF_ROWS("JaggedBiasAttention", AttentionOp, FUSEDREC_ON_HOST);
FUSEDREC_KERNEL_OF_ROWS("JaggedBiasAttentionGrad", AttentionOp, FUSEDREC_ON_HOST);
#undef FUSEDREC_ON_HOST

}  // namespace
}  // namespace fusedrec
