#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs and attributes of all ops. The attributes say which of the inputs count.
#define FUSEDREC_ROWS                   \
  .Input("row_splits: int64")           \
  .Input("num_targets: int64")          \
  .Input("contextual_lengths: int64")   \
  .Input("position_weights: float")     \
  .Input("time_weights: float")         \
  .Input("thresholds: int64")           \
  .Input("asks: int64")                 \
  .Input("answers: int64")              \
  .Input("query_splits: num_query_splits * int64")

#define FUSEDREC_ROWS_ATTRS                \
  .Attr("T: {float, half, bfloat16}")      \
  .Attr("num_query_splits: int >= 0 = 0")  \
  .Attr("targets: bool = false")           \
  .Attr("attention_window: int >= 0 = 0")  \
  .Attr("min_full_length: int >= 0 = 0")   \
  .Attr("global_window: int >= 0 = 0")     \
  .Attr("target_group_size: int >= 1 = 1") \
  .Attr("position: bool = false")          \
  .Attr("time: {'none', 'buckets', 'power', 'exponential', 'stretched'} = 'none'")

// Further ones of the ops that attend. Lists have an entry or none; the norm has weight and bias or none.
#define FUSEDREC_ATTENTION                           \
  .Input("query: T")                                 \
  .Input("key: T")                                   \
  .Input("value: T")                                 \
  .Input("scale: float") FUSEDREC_ROWS               \
  .Input("dropout_seed: num_dropout_seeds * int64")  \
  .Input("gate: num_gates * T")                      \
  .Input("norm: num_norms * float")

#define FUSEDREC_ATTENTION_ATTRS FUSEDREC_ROWS_ATTRS  \
  .Attr("alpha: float = 1.0")                         \
  .Attr("dropout: float = 0.0")                       \
  .Attr("num_dropout_seeds: int >= 0 = 0")            \
  .Attr("num_gates: int >= 0 = 0")                    \
  .Attr("num_norms: int >= 0 = 0")                    \
  .Attr("per_head: bool = false")                     \
  .Attr("gate_first: bool = false")                   \
  .Attr("epsilon: float = 1e-6")

std::vector<ShapeHandle> Inputs(InferenceContext* c, const char* name) {
  std::vector<ShapeHandle> shapes;
  TF_CHECK_OK(c->input(name, &shapes));
  return shapes;
}

// Checks the ranks of the inputs of FUSEDREC_ROWS. own_queries: whether the op has query_splits.
absl::Status CheckRows(InferenceContext* c, bool* own_queries) {
  ShapeHandle unused;
  for (const char* name : {"row_splits", "num_targets", "contextual_lengths", "position_weights", "time_weights",
                           "thresholds", "asks", "answers", "query_splits"}) {
    for (const ShapeHandle shape : Inputs(c, name)) TF_RETURN_IF_ERROR(c->WithRank(shape, 1, &unused));
  }
  const size_t number = Inputs(c, "query_splits").size();
  if (number > 1) return absl::InvalidArgumentError(absl::StrCat("query_splits must be one tensor, got ", number, "."));
  *own_queries = number == 1;
  return absl::OkStatus();
}

// Gives dimension d of two shapes the same size.
absl::Status MergeDim(InferenceContext* c, int d, ShapeHandle* a, ShapeHandle* b) {
  DimensionHandle common;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(*a, d), c->Dim(*b, d), &common));
  TF_RETURN_IF_ERROR(c->ReplaceDim(*a, d, common, a));
  return c->ReplaceDim(*b, d, common, b);
}

struct Tokens {
  ShapeHandle query, key, value, out;
};

// Merges the dimensions of query, key, value and gate. With query_splits, query has its own T.
absl::Status CheckAttention(InferenceContext* c, Tokens* tokens) {
  bool own_queries = false;
  ShapeHandle *query = &tokens->query, *key = &tokens->key, *value = &tokens->value, unused;
  TF_RETURN_IF_ERROR(CheckRows(c, &own_queries));
  TF_RETURN_IF_ERROR(c->WithRank(Inputs(c, "query")[0], 3, query));
  TF_RETURN_IF_ERROR(c->WithRank(Inputs(c, "key")[0], 3, key));
  TF_RETURN_IF_ERROR(c->WithRank(Inputs(c, "value")[0], 3, value));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // T and H
  for (int d = own_queries ? 1 : 0; d < 3; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, query, key));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // what query knows of them
  TF_RETURN_IF_ERROR(c->ReplaceDim(*value, 0, c->Dim(*query, 0), &tokens->out));
  TF_RETURN_IF_ERROR(c->WithRankAtMost(Inputs(c, "scale")[0], 1, &unused));
  for (const ShapeHandle gate : Inputs(c, "gate")) TF_RETURN_IF_ERROR(c->Merge(gate, tokens->out, &tokens->out));
  for (const ShapeHandle norm : Inputs(c, "norm")) TF_RETURN_IF_ERROR(c->WithRank(norm, 1, &unused));
  return absl::OkStatus();
}

// Sets the next outputs to these shapes.
void SetOutputs(InferenceContext* c, const std::vector<ShapeHandle>& shapes, int* next) {
  for (const ShapeHandle shape : shapes) c->set_output((*next)++, shape);
}

}  // namespace

REGISTER_OP("Fusedrec>JaggedAttention")
    FUSEDREC_ATTENTION
    .Output("out: T")
    .Output("attended: num_gates * T")
    FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      TF_RETURN_IF_ERROR(CheckAttention(c, &tokens));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, tokens.out);
      return absl::OkStatus();
    })
    .Doc("SiLU attention over rows of different length (HSTU), in each row and head; then gate and norm, if given.");

REGISTER_OP("Fusedrec>JaggedAttentionGrad")
    .Input("grads: T")
    .Input("attended: num_gates * T")
    FUSEDREC_ATTENTION
    .Output("query_grads: T")
    .Output("key_grads: T")
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    .Output("gate_grads: num_gates * T")
    .Output("norm_grads: num_norms * float")
    FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      int next = 0;
      TF_RETURN_IF_ERROR(CheckAttention(c, &tokens));
      for (const char* name : {"grads", "attended"}) {
        for (const ShapeHandle s : Inputs(c, name)) TF_RETURN_IF_ERROR(c->Merge(s, tokens.out, &tokens.out));
      }
      SetOutputs(c, {tokens.query, tokens.key, tokens.value}, &next);
      for (const char* name : {"position_weights", "time_weights"}) SetOutputs(c, Inputs(c, name), &next);
      SetOutputs(c, std::vector<ShapeHandle>(Inputs(c, "gate").size(), tokens.out), &next);
      SetOutputs(c, Inputs(c, "norm"), &next);
      return absl::OkStatus();
    })
    .Doc("Gradient of JaggedAttention: scores are computed again, tile by tile.");

REGISTER_OP("Fusedrec>JaggedBiasAttention")
    .Input("value: T")
    FUSEDREC_ROWS
    .Output("out: T")
    FUSEDREC_ROWS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle value;
      DimensionHandle columns;
      bool own_queries = false, position = false;
      std::string time;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &value));
      TF_RETURN_IF_ERROR(CheckRows(c, &own_queries));
      TF_RETURN_IF_ERROR(c->GetAttr("position", &position));
      TF_RETURN_IF_ERROR(c->GetAttr("time", &time));
      const int64_t channels = (position ? 1 : 0) + (time == "none" ? 0 : 1);
      TF_RETURN_IF_ERROR(c->Multiply(c->Dim(value, 2), channels, &columns));
      TF_RETURN_IF_ERROR(c->ReplaceDim(value, 2, columns, &value));
      if (own_queries) TF_RETURN_IF_ERROR(c->ReplaceDim(value, 0, c->UnknownDim(), &value));
      c->set_output(0, value);
      return absl::OkStatus();
    })
    .Doc("The channels of FuXi: visible values summed with the weights of position, of time, or of each.");

REGISTER_OP("Fusedrec>JaggedBiasAttentionGrad")
    .Input("grads: T")
    .Input("value: T")
    FUSEDREC_ROWS
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    FUSEDREC_ROWS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle value, unused;
      bool own_queries = false;
      int next = 0;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 3, &value));
      TF_RETURN_IF_ERROR(CheckRows(c, &own_queries));
      SetOutputs(c, {value}, &next);
      for (const char* name : {"position_weights", "time_weights"}) SetOutputs(c, Inputs(c, name), &next);
      return absl::OkStatus();
    })
    .Doc("Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.");

}  // namespace fusedrec
