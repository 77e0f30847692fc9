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
    .Doc(R"doc(
Gives rows that a table does not hold yet their initial value, a pure function of (table seed, id, column).

Numbers come from Philox4x32-10 (Salmon et al., SC 2011), keyed by the table's seed and counted by id and column.

rows: <T>[W, D] rows found in the table; anything where exists is false.
exists: <bool>[W] whether the table holds the row.
ids: <int64>[W] grouped by segment.
segment_splits: <int64>[S+1] segment (= table) s is ids[segment_splits[s]:segment_splits[s+1]].
out: <T>[W, D] rows, with initial values where exists is false.
seeds: [S] one 64-bit seed per table.
distribution: 'constant' (a), 'uniform' on [a, b), 'normal' (mean a, standard deviation b), 'truncated_normal' (the same,
  given that it lies inside two standard deviations).
)doc");

}  // namespace fusedrec
