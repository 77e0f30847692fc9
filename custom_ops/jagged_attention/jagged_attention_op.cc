#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

#include "jagged_attention/attention_ops.h"

namespace fusedrec {
namespace {

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

REGISTER_OP("Fusedrec>JaggedAttention")
    FUSEDREC_ATTENTION_INPUTS
    FUSEDREC_BIAS_INPUTS
    FUSEDREC_DROPOUT_INPUT
    .Output("out: T")
    FUSEDREC_ATTENTION_ATTRS
    FUSEDREC_MASK_AND_BIAS_ATTRS
    FUSEDREC_DROPOUT_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      TF_RETURN_IF_ERROR(CheckAttention(c, 0, &tokens));
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
time_weights: <float>[J+1] weight of each bucket, or the parameters of the function `time`; ignored with time = 'none'.
thresholds: <int64>[J] not decreasing; the bucket of a pair is the number of thresholds <= |asks[i] - answers[j]|.
asks: <int64>[Tq] seconds; ignored with time = 'none', as answers.
answers: <int64>[T] seconds.
contextual_lengths: <int64>[B] context tokens at the start of each row, or [0] where no row has any.
query_splits: none, or one <int64>[B+1]; row b has the queries query_splits[b] .. query_splits[b+1].
dropout_seed: with `dropout`, one <int64>[]. A pair is hidden with this probability, by seed, row, head, key and query.
out: <T>[Tq, H, Dv]; computed in float32, rounded once.
)doc");

REGISTER_OP("Fusedrec>JaggedAttentionGrad")
    .Input("grads: T")
    FUSEDREC_ATTENTION_INPUTS
    FUSEDREC_BIAS_INPUTS
    FUSEDREC_DROPOUT_INPUT
    .Output("query_grads: T")
    .Output("key_grads: T")
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    FUSEDREC_ATTENTION_ATTRS
    FUSEDREC_MASK_AND_BIAS_ATTRS
    FUSEDREC_DROPOUT_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(CheckAttention(c, 1, &tokens));
      TF_RETURN_IF_ERROR(c->Merge(c->input(0), tokens.out, &unused));
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

grads: <T>[Tq, H, Dv] of out. JaggedAttention has the other inputs.
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
      bool own_queries = false;
      TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
      if (own_queries) TF_RETURN_IF_ERROR(c->ReplaceDim(value, 0, c->UnknownDim(), &value));
      c->set_output(0, value);
      return absl::OkStatus();
    })
    .Doc(R"doc(
The channels of FuXi: out_i = [sum over j of position_ij visible_ij v_j | sum over j of time_ij visible_ij v_j] in each
row and head, without those of the two that `position` and `time` leave out. The maps are the same for all heads.

value: <T>[T, H, Dv]. JaggedAttention has the other inputs.
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
      bool own_queries = false;
      TF_RETURN_IF_ERROR(HasQuerySplits(c, &own_queries));
      c->set_output(0, value);
      c->set_output(1, c->input(4));
      c->set_output(2, c->input(5));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.

grads: <T>[Tq, H, channels * Dv] of out. JaggedBiasAttention has the other inputs.
value_grads: <T>[T, H, Dv].
position_grads: <float> of the shape of position_weights; 0 without `position`.
time_grads: <float> of the shape of time_weights; 0 with time = 'none'.
)doc");

}  // namespace fusedrec
