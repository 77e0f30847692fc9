// The resource of a table, and the updates of its rows.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

static absl::Status GradientsShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));  // handles [W]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));  // inverse [V]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &unused));  // grads [>= V, D]
  for (int i = 4; i < c->num_inputs(); ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  c->set_output(0, c->UnknownShapeOfRank(1));
  return absl::OkStatus();
}

REGISTER_OP("Fusedrec>HashTable")
    .Output("table: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("anonymous: bool = false")
    .Attr("tables: list(string)")  // options.h
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("A dynamic embedding table of S segments (tables of one group), which makes rows as ids come (MTGRBoost, section 4.1).");

REGISTER_OP("Fusedrec>TableApplyGradients")
    .Input("table: resource")
    .Input("handles: int64")
    .Input("inverse: int32")
    .Input("grads: T")
    .Input("scale: float")
    .Input("learning_rate: float")
    .Input("step: int64")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(GradientsShape)
    .Doc("Sums gradients of equal rows over their sources, in the order received, and applies the table's optimizer in place.");

REGISTER_OP("Fusedrec>TableAccumulateGradients")
    .Input("table: resource")
    .Input("handles: int64")
    .Input("inverse: int32")
    .Input("grads: T")
    .Input("scale: float")
    .Input("begin: bool")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(GradientsShape)
    .Doc("Adds gradients to sums by row, which TableApplyAccumulated applies (MTGRBoost, section 5.2).");

REGISTER_OP("Fusedrec>TableApplyAccumulated")
    .Input("table: resource")
    .Input("learning_rate: float")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Applies the optimizer to the rows with accumulated sums, and clears the sums.");

}  // namespace fusedrec
