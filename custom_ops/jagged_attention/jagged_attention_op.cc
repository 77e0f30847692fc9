#include "absl/strings/str_replace.h"
#include "common/shapes.h"

namespace fusedrec {
namespace {

using tensorflow::shape_inference::InferenceContext;

// Inputs and attributes of all ops. The attributes say which of the inputs count.
#define FUSEDREC_ROWS                                                                                         \
  .Input("row_splits: int64").Input("num_targets: int64").Input("contextual_lengths: int64")                  \
  .Input("position_weights: float").Input("time_weights: float").Input("thresholds: int64").Input("asks: int64") \
  .Input("answers: int64").Input("query_splits: num_query_splits * int64")
#define FUSEDREC_ROWS_SHAPES " [s] [g] [l] [p] [w] [r] [a] [b] num_query_splits*[e] "

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
#define FUSEDREC_ATTENTION_SHAPES \
  " [q,h,d] [t,h,d] [t,h,v] *" FUSEDREC_ROWS_SHAPES "num_dropout_seeds*[] num_gates*[q,h,v] num_norms*[n] "

#define FUSEDREC_ATTENTION_ATTRS FUSEDREC_ROWS_ATTRS                                                       \
  .Attr("alpha: float = 1.0").Attr("dropout: float = 0.0").Attr("num_dropout_seeds: int >= 0 = 0")         \
  .Attr("num_gates: int >= 0 = 0").Attr("num_norms: int >= 0 = 0").Attr("per_head: bool = false")          \
  .Attr("gate_first: bool = false").Attr("epsilon: float = 1e-6")

// Shapes of an op where q queries ask t tokens. Without query_splits, all tokens ask.
class QueryShapes {
 public:
  explicit QueryShapes(const char* text)
      : last_ask_(text), all_ask_(absl::StrReplaceAll(text, {{"[q,", "[t,"}}).c_str()) {}

  absl::Status operator()(InferenceContext* c) const {
    int num_query_splits;
    FUSEDREC_TRY(c->GetAttr("num_query_splits", &num_query_splits));
    return (num_query_splits > 0 ? last_ask_ : all_ask_)(c);
  }

 private:
  const Shapes last_ask_, all_ask_;
};

}  // namespace

REGISTER_OP("Fusedrec>JaggedAttention")
FUSEDREC_ATTENTION.Output("out: T")
    .Output("attended: num_gates * T") FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn(QueryShapes(FUSEDREC_ATTENTION_SHAPES "-> [q,h,v] num_gates*[q,h,v]"))
    .Doc("SiLU attention over rows of different length (HSTU), in each row and head; then gate and norm, if given.");

REGISTER_OP("Fusedrec>JaggedAttentionGrad")
    .Input("grads: T").Input("attended: num_gates * T") FUSEDREC_ATTENTION.Output("query_grads: T")
    .Output("key_grads: T").Output("value_grads: T").Output("position_grads: float").Output("time_grads: float")
    .Output("gate_grads: num_gates * T")
    .Output("norm_grads: num_norms * float") FUSEDREC_ATTENTION_ATTRS
    .SetShapeFn(QueryShapes("[q,h,v] num_gates*[q,h,v]" FUSEDREC_ATTENTION_SHAPES
                            "-> [q,h,d] [t,h,d] [t,h,v] [p] [w] num_gates*[q,h,v] num_norms*[n]"))
    .Doc("Gradient of JaggedAttention: scores are computed again, tile by tile.");

REGISTER_OP("Fusedrec>JaggedBiasAttention")
    .Input("value: T") FUSEDREC_ROWS.Output("out: T") FUSEDREC_ROWS_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      static const QueryShapes& shapes = *new QueryShapes("[t,h,d]" FUSEDREC_ROWS_SHAPES "-> [q,h,d]");
      tensorflow::shape_inference::DimensionHandle columns;
      tensorflow::shape_inference::ShapeHandle out;
      bool position = false;
      std::string time;
      FUSEDREC_TRY(shapes(c));
      FUSEDREC_TRY(c->GetAttr("position", &position));
      FUSEDREC_TRY(c->GetAttr("time", &time));
      const int64_t channels = (position ? 1 : 0) + (time == "none" ? 0 : 1);
      FUSEDREC_TRY(c->Multiply(c->Dim(c->output(0), 2), channels, &columns));
      FUSEDREC_TRY(c->ReplaceDim(c->output(0), 2, columns, &out));
      c->set_output(0, out);
      return absl::OkStatus();
    })
    .Doc("The channels of FuXi: visible values summed with the weights of position, of time, or of each.");

REGISTER_OP("Fusedrec>JaggedBiasAttentionGrad")
    .Input("grads: T").Input("value: T") FUSEDREC_ROWS.Output("value_grads: T")
    .Output("position_grads: float")
    .Output("time_grads: float") FUSEDREC_ROWS_ATTRS
    .SetShapeFn(Shapes("[q,h,c] [k,h,d]" FUSEDREC_ROWS_SHAPES "-> [k,h,d] [p] [w]"))
    .Doc("Gradient of JaggedBiasAttention, deterministic as JaggedAttentionGrad.");

}  // namespace fusedrec
