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
    .Doc("SiLU attention over rows of different length (HSTU), in each row and head.");

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
    .Doc("Gradient of JaggedAttention: scores are computed again, tile by tile.");

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
    .Doc("The channels of FuXi: visible values summed with the weights of position, of time, or of each.");

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
    .Doc("Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.");

}  // namespace fusedrec
