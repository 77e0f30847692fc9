#include "common/shapes.h"

namespace fusedrec {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs and attributes of all ops. The attributes say which of the inputs count.
#define FUSEDREC_ROWS                                                                                         \
  .Input("row_splits: int64").Input("num_targets: int64").Input("contextual_lengths: int64")                  \
  .Input("position_weights: float").Input("time_weights: float").Input("thresholds: int64").Input("asks: int64") \
  .Input("answers: int64").Input("query_splits: num_query_splits * int64")

#define FUSEDREC_ROWS_ATTRS                                                                       \
  .Attr("T: {float, half, bfloat16}").Attr("num_query_splits: int >= 0 = 0").Attr("targets: bool = false") \
  .Attr("attention_window: int >= 0 = 0").Attr("min_full_length: int >= 0 = 0")                   \
  .Attr("global_window: int >= 0 = 0").Attr("target_group_size: int >= 1 = 1")                    \
  .Attr("position: bool = false")                                                                 \
  .Attr("time: {'none', 'buckets', 'power', 'exponential', 'stretched'} = 'none'")

// Further ones of the ops that attend. Lists have an entry or none; the norm has weight and bias or none.
#define FUSEDREC_ATTENTION                                                                  \
  .Input("query: T").Input("key: T").Input("value: T").Input("scale: float") FUSEDREC_ROWS   \
  .Input("dropout_seed: num_dropout_seeds * int64").Input("gate: num_gates * T").Input("norm: num_norms * float")

#define FUSEDREC_ATTENTION_ATTRS FUSEDREC_ROWS_ATTRS                                                       \
  .Attr("alpha: float = 1.0").Attr("dropout: float = 0.0").Attr("num_dropout_seeds: int >= 0 = 0")         \
  .Attr("num_gates: int >= 0 = 0").Attr("num_norms: int >= 0 = 0").Attr("per_head: bool = false")          \
  .Attr("gate_first: bool = false").Attr("epsilon: float = 1e-6")

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
    for (const ShapeHandle shape : Inputs(c, name)) FUSEDREC_TRY(c->WithRank(shape, 1, &unused));
  }
  *own_queries = !Inputs(c, "query_splits").empty();
  return absl::OkStatus();
}

absl::Status MergeDim(InferenceContext* c, int d, ShapeHandle* a, ShapeHandle* b) {
  DimensionHandle common;
  FUSEDREC_TRY(c->Merge(c->Dim(*a, d), c->Dim(*b, d), &common));
  FUSEDREC_TRY(c->ReplaceDim(*a, d, common, a));
  return c->ReplaceDim(*b, d, common, b);
}

struct Tokens {
  ShapeHandle query, key, value, out;
};

// Merges the dimensions of query, key, value and gate. With query_splits, query has its own T.
absl::Status CheckAttention(InferenceContext* c, Tokens* tokens) {
  bool own_queries = false;
  ShapeHandle *query = &tokens->query, *key = &tokens->key, *value = &tokens->value, unused;
  FUSEDREC_TRY(CheckRows(c, &own_queries));
  FUSEDREC_TRY(c->WithRank(Inputs(c, "query")[0], 3, query));
  FUSEDREC_TRY(c->WithRank(Inputs(c, "key")[0], 3, key));
  FUSEDREC_TRY(c->WithRank(Inputs(c, "value")[0], 3, value));
  for (int d = 0; d < 2; ++d) FUSEDREC_TRY(MergeDim(c, d, key, value));  // T and H
  for (int d = own_queries ? 1 : 0; d < 3; ++d) FUSEDREC_TRY(MergeDim(c, d, query, key));
  for (int d = 0; d < 2; ++d) FUSEDREC_TRY(MergeDim(c, d, key, value));  // what query knows of them
  FUSEDREC_TRY(c->ReplaceDim(*value, 0, c->Dim(*query, 0), &tokens->out));
  FUSEDREC_TRY(c->WithRankAtMost(Inputs(c, "scale")[0], 1, &unused));
  for (const ShapeHandle gate : Inputs(c, "gate")) FUSEDREC_TRY(c->Merge(gate, tokens->out, &tokens->out));
  for (const ShapeHandle norm : Inputs(c, "norm")) FUSEDREC_TRY(c->WithRank(norm, 1, &unused));
  return absl::OkStatus();
}

void SetOutputs(InferenceContext* c, const std::vector<ShapeHandle>& shapes, int* next) {
  for (const ShapeHandle shape : shapes) c->set_output((*next)++, shape);
}

}  // namespace

REGISTER_OP("Fusedrec>JaggedAttention")
FUSEDREC_ATTENTION.Output("out: T")
    .Output("attended: num_gates * T") FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      FUSEDREC_TRY(CheckAttention(c, &tokens));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, tokens.out);
      return absl::OkStatus();
    })
    .Doc("SiLU attention over rows of different length (HSTU), in each row and head; then gate and norm, if given.");

REGISTER_OP("Fusedrec>JaggedAttentionGrad")
    .Input("grads: T").Input("attended: num_gates * T") FUSEDREC_ATTENTION.Output("query_grads: T")
    .Output("key_grads: T").Output("value_grads: T").Output("position_grads: float").Output("time_grads: float")
    .Output("gate_grads: num_gates * T")
    .Output("norm_grads: num_norms * float") FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      int next = 0;
      FUSEDREC_TRY(CheckAttention(c, &tokens));
      for (const char* name : {"grads", "attended"}) {
        for (const ShapeHandle s : Inputs(c, name)) FUSEDREC_TRY(c->Merge(s, tokens.out, &tokens.out));
      }
      SetOutputs(c, {tokens.query, tokens.key, tokens.value}, &next);
      for (const char* name : {"position_weights", "time_weights"}) SetOutputs(c, Inputs(c, name), &next);
      SetOutputs(c, std::vector<ShapeHandle>(Inputs(c, "gate").size(), tokens.out), &next);
      SetOutputs(c, Inputs(c, "norm"), &next);
      return absl::OkStatus();
    })
    .Doc("Gradient of JaggedAttention: scores are computed again, tile by tile.");

REGISTER_OP("Fusedrec>JaggedBiasAttention")
    .Input("value: T") FUSEDREC_ROWS.Output("out: T") FUSEDREC_ROWS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle value;
      DimensionHandle columns;
      bool own_queries = false, position = false;
      std::string time;
      FUSEDREC_TRY(c->WithRank(c->input(0), 3, &value));
      FUSEDREC_TRY(CheckRows(c, &own_queries));
      FUSEDREC_TRY(c->GetAttr("position", &position));
      FUSEDREC_TRY(c->GetAttr("time", &time));
      const int64_t channels = (position ? 1 : 0) + (time == "none" ? 0 : 1);
      FUSEDREC_TRY(c->Multiply(c->Dim(value, 2), channels, &columns));
      FUSEDREC_TRY(c->ReplaceDim(value, 2, columns, &value));
      if (own_queries) FUSEDREC_TRY(c->ReplaceDim(value, 0, c->UnknownDim(), &value));
      c->set_output(0, value);
      return absl::OkStatus();
    })
    .Doc("The channels of FuXi: visible values summed with the weights of position, of time, or of each.");

REGISTER_OP("Fusedrec>JaggedBiasAttentionGrad")
    .Input("grads: T").Input("value: T") FUSEDREC_ROWS.Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float") FUSEDREC_ROWS_ATTRS
    .SetShapeFn(Shapes("[q,h,c] [k,h,d] [s] [g] [l] [p] [w] [r] [a] [b] num_query_splits*[e] -> [k,h,d] [p] [w]"))
    .Doc("Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.");

}  // namespace fusedrec
