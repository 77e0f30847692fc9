#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Checks the ranks of row_splits and num_targets, inputs `first` and `first + 1` of every op of this folder.
absl::Status CheckRows(InferenceContext* c, int first) {
  ShapeHandle unused;
  for (int i = first; i < first + 2; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return absl::OkStatus();
}

// Checks the ranks of position_weights, time_weights, thresholds, asks, answers and contextual_lengths.
absl::Status CheckBias(InferenceContext* c, int first) {
  ShapeHandle unused;
  for (int i = first; i < first + 6; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return absl::OkStatus();
}

// Checks query_splits, the last input, and returns whether it is there.
absl::Status HasQuerySplits(InferenceContext* c, bool* has) {
  int number;
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->GetAttr("num_query_splits", &number));
  if (number > 1) return absl::InvalidArgumentError(absl::StrCat("query_splits must be one tensor, got ", number, "."));
  *has = number == 1;
  return *has ? c->WithRank(c->input(c->num_inputs() - 1), 1, &unused) : absl::OkStatus();
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

// Merges the dimensions of query, key and value, inputs `first` to `first + 2`. With query_splits, query has its own T.
absl::Status MergeTokens(InferenceContext* c, int first, Tokens* tokens) {
  bool own_queries;
  TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
  ShapeHandle *query = &tokens->query, *key = &tokens->key, *value = &tokens->value;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 3, query));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 1), 3, key));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first + 2), 3, value));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // T and H
  for (int d = own_queries ? 1 : 0; d < 3; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, query, key));
  for (int d = 0; d < 2; ++d) TF_RETURN_IF_ERROR(MergeDim(c, d, key, value));  // what query knows of them
  return c->ReplaceDim(*value, 0, c->Dim(*query, 0), &tokens->out);
}

// Channels of JaggedBiasAttention, from its attributes.
absl::Status NumChannels(InferenceContext* c, int64_t* channels) {
  bool position;
  std::string time;
  TF_RETURN_IF_ERROR(c->GetAttr("position", &position));
  TF_RETURN_IF_ERROR(c->GetAttr("time", &time));
  *channels = (position ? 1 : 0) + (time == "none" ? 0 : 1);
  return absl::OkStatus();
}

}  // namespace

// The last inputs of every op of this folder, and the attributes that say which of them count.
#define FUSEDREC_BIAS_INPUTS        \
  .Input("position_weights: float") \
  .Input("time_weights: float")     \
  .Input("thresholds: int64")       \
  .Input("asks: int64")             \
  .Input("answers: int64")          \
  .Input("contextual_lengths: int64") \
  .Input("query_splits: num_query_splits * int64")

#define FUSEDREC_MASK_AND_BIAS_ATTRS       \
  .Attr("attention_window: int >= 0 = 0")  \
  .Attr("min_full_length: int >= 0 = 0")   \
  .Attr("target_group_size: int >= 1 = 1") \
  .Attr("targets: bool = false")           \
  .Attr("position: bool = false")          \
  .Attr("num_query_splits: int >= 0 = 0")  \
  .Attr("time: {'none', 'buckets', 'power', 'exponential', 'stretched'} = 'none'")

REGISTER_OP("Fusedrec>JaggedAttention")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("row_splits: int64")
    .Input("num_targets: int64")
    .Input("scale: float")
    FUSEDREC_BIAS_INPUTS
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("alpha: float = 1.0")
    FUSEDREC_MASK_AND_BIAS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(MergeTokens(c, 0, &tokens));
      TF_RETURN_IF_ERROR(CheckRows(c, 3));
      TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(5), 1, &unused));
      TF_RETURN_IF_ERROR(CheckBias(c, 6));
      c->set_output(0, tokens.out);
      return absl::OkStatus();
    })
    .Doc(R"doc(
SiLU attention over rows of different length: out_i = scale_i * sum over j of SiLU(alpha q_i . k_j + bias_ij)
visible_ij v_j, in each row and head. With query_splits, the last tokens of a row ask, as many as it has queries; inputs
[Tq] are of these tokens. Without, Tq is T and every token asks.

query: <T>[Tq, H, Dqk].
key: <T>[T, H, Dqk].
value: <T>[T, H, Dv].
row_splits: <int64>[B+1] row b is the tokens row_splits[b] .. row_splits[b+1].
num_targets: <int64>[B] targets at the end of each row; ignored without `targets`.
scale: <float>[] or [Tq], one per query token.
position_weights: <float>[2N-1] entry N - 1 + place(j) - place(i); ignored without `position`.
time_weights: <float>[G+1] weight of each bucket, or the parameters of the function `time`; ignored with time = 'none'.
thresholds: <int64>[G] not decreasing; the bucket of a pair is the number of thresholds <= |asks[i] - answers[j]|.
asks: <int64>[Tq] seconds; ignored with time = 'none', as answers.
answers: <int64>[T] seconds.
contextual_lengths: <int64>[B] context tokens at the start of each row, or [0] where no row has any.
query_splits: none, or one <int64>[B+1]; row b has the queries query_splits[b] .. query_splits[b+1].
out: <T>[Tq, H, Dv]; computed in float32, rounded once.
)doc");

REGISTER_OP("Fusedrec>JaggedAttentionGrad")
    .Input("grads: T")
    .Input("query: T")
    .Input("key: T")
    .Input("value: T")
    .Input("row_splits: int64")
    .Input("num_targets: int64")
    .Input("scale: float")
    FUSEDREC_BIAS_INPUTS
    .Output("query_grads: T")
    .Output("key_grads: T")
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("alpha: float = 1.0")
    FUSEDREC_MASK_AND_BIAS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(MergeTokens(c, 1, &tokens));
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), tokens.out, &unused));
      TF_RETURN_IF_ERROR(CheckRows(c, 4));
      TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(6), 1, &unused));
      TF_RETURN_IF_ERROR(CheckBias(c, 7));
      c->set_output(0, tokens.query);
      c->set_output(1, tokens.key);
      c->set_output(2, tokens.value);
      c->set_output(3, c->input(7));
      c->set_output(4, c->input(8));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of JaggedAttention: scores are computed again, tile by tile. Sums run in an order that the lengths of the rows
alone determine (deterministic).

grads: <T>[Tq, H, Dv] of out. The other inputs are those of JaggedAttention.
query_grads: <T>[Tq, H, Dqk].
key_grads: <T>[T, H, Dqk].
value_grads: <T>[T, H, Dv].
position_grads: <float> of the shape of position_weights; 0 without `position`.
time_grads: <float> of the shape of time_weights; 0 with time = 'none'.
)doc");

REGISTER_OP("Fusedrec>JaggedBiasAttention")
    .Input("value: T")
    .Input("row_splits: int64")
    .Input("num_targets: int64")
    FUSEDREC_BIAS_INPUTS
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    FUSEDREC_MASK_AND_BIAS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle value;
      DimensionHandle columns;
      int64_t channels = 0;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &value));
      TF_RETURN_IF_ERROR(CheckRows(c, 1));
      TF_RETURN_IF_ERROR(CheckBias(c, 3));
      TF_RETURN_IF_ERROR(NumChannels(c, &channels));
      TF_RETURN_IF_ERROR(c->Multiply(c->Dim(value, 2), channels, &columns));
      TF_RETURN_IF_ERROR(c->ReplaceDim(value, 2, columns, &value));
      bool own_queries;
      TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
      if (own_queries) TF_RETURN_IF_ERROR(c->ReplaceDim(value, 0, c->UnknownDim(), &value));
      c->set_output(0, value);
      return absl::OkStatus();
    })
    .Doc(R"doc(
The channels of FuXi: out_i = [sum over j of position_ij visible_ij v_j | sum over j of time_ij visible_ij v_j] in each
row and head, without those of the two that `position` and `time` leave out. The maps are the same for all heads.

value: <T>[T, H, Dv]. The other inputs are those of JaggedAttention.
out: <T>[Tq, H, channels * Dv]; computed in float32, rounded once.
)doc");

REGISTER_OP("Fusedrec>JaggedBiasAttentionGrad")
    .Input("grads: T")
    .Input("value: T")
    .Input("row_splits: int64")
    .Input("num_targets: int64")
    FUSEDREC_BIAS_INPUTS
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    .Attr("T: {float, half, bfloat16}")
    FUSEDREC_MASK_AND_BIAS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle value, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 3, &value));
      TF_RETURN_IF_ERROR(CheckRows(c, 2));
      TF_RETURN_IF_ERROR(CheckBias(c, 4));
      bool own_queries;
      TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
      c->set_output(0, value);
      c->set_output(1, c->input(4));
      c->set_output(2, c->input(5));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.

grads: <T>[Tq, H, channels * Dv] of out. The other inputs are those of JaggedBiasAttention.
value_grads: <T>[T, H, Dv].
position_grads: <float> of the shape of position_weights; 0 without `position`.
time_grads: <float> of the shape of time_weights; 0 with time = 'none'.
)doc");

#undef FUSEDREC_BIAS_INPUTS
#undef FUSEDREC_MASK_AND_BIAS_ATTRS

}  // namespace fusedrec
