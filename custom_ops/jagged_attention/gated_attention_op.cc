#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

#include "jagged_attention/attention_ops.h"

namespace fusedrec {
namespace {

// Checks gate, norm_weight and norm_bias at `first`, and gives the gate the shape of the attention.
absl::Status CheckGate(InferenceContext* c, int first, ShapeHandle* attended) {
  ShapeHandle unused;
  for (int i = first + 1; i < first + 3; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return c->Merge(c->input(first), *attended, attended);
}

}  // namespace

// Inputs and attributes of gate and norm behind the attention.
#define FUSEDREC_GATE_INPUTS    \
  .Input("gate: T")             \
  .Input("norm_weight: float")  \
  .Input("norm_bias: float")

#define FUSEDREC_GATE_ATTRS           \
  .Attr("per_head: bool = false")     \
  .Attr("gate_first: bool = false")   \
  .Attr("epsilon: float = 1e-6")

REGISTER_OP("Fusedrec>GatedAttention")
    FUSEDREC_GATE_INPUTS
    FUSEDREC_ATTENTION_INPUTS
    FUSEDREC_BIAS_INPUTS
    FUSEDREC_DROPOUT_INPUT
    .Output("out: T")
    .Output("attended: T")
    FUSEDREC_ATTENTION_ATTRS
    FUSEDREC_GATE_ATTRS
    FUSEDREC_MASK_AND_BIAS_ATTRS
    FUSEDREC_DROPOUT_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      TF_RETURN_IF_ERROR(CheckAttention(c, 3, &tokens));
      TF_RETURN_IF_ERROR(CheckGate(c, 0, &tokens.out));
      c->set_output(0, tokens.out);
      c->set_output(1, tokens.out);
      return absl::OkStatus();
    })
    .Doc("JaggedAttention, then gate and norm: gate * norm(attended), or norm(gate * attended) with `gate_first`.");

REGISTER_OP("Fusedrec>GatedAttentionGrad")
    .Input("grads: T")
    .Input("attended: T")
    FUSEDREC_GATE_INPUTS
    FUSEDREC_ATTENTION_INPUTS
    FUSEDREC_BIAS_INPUTS
    FUSEDREC_DROPOUT_INPUT
    .Output("gate_grads: T")
    .Output("norm_weight_grads: float")
    .Output("norm_bias_grads: float")
    .Output("query_grads: T")
    .Output("key_grads: T")
    .Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float")
    FUSEDREC_ATTENTION_ATTRS
    FUSEDREC_GATE_ATTRS
    FUSEDREC_MASK_AND_BIAS_ATTRS
    FUSEDREC_DROPOUT_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      Tokens tokens;
      TF_RETURN_IF_ERROR(CheckAttention(c, 5, &tokens));
      TF_RETURN_IF_ERROR(CheckGate(c, 2, &tokens.out));
      for (int i = 0; i < 2; ++i) TF_RETURN_IF_ERROR(c->Merge(c->input(i), tokens.out, &tokens.out));
      c->set_output(0, tokens.out);
      c->set_output(1, c->input(3));
      c->set_output(2, c->input(4));
      c->set_output(3, tokens.query);
      c->set_output(4, tokens.key);
      c->set_output(5, tokens.value);
      c->set_output(6, c->input(11));
      c->set_output(7, c->input(12));
      return absl::OkStatus();
    })
    .Doc("Gradient of GatedAttention, deterministic as JaggedAttentionGrad.");

#undef FUSEDREC_GATE_INPUTS
#undef FUSEDREC_GATE_ATTRS

}  // namespace fusedrec
