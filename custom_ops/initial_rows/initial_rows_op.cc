#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>InitialRows")
    .Input("rows: T")
    .Input("exists: bool")
    .Input("ids: int64")
    .Input("segment_splits: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("seeds: list(int) >= 1")
    .Attr("distribution: {'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("a: float")
    .Attr("b: float = 0.0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));    // [W, D]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));  // [W]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));  // [W]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &unused));  // [S+1]
      c->set_output(0, rows);
      return absl::OkStatus();
    })
    .Doc("Gives rows that a table does not hold yet their initial value, a pure function of (table seed, id, column).");

}  // namespace fusedrec
