#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>SegmentUnique")
    .Input("ids: int64")
    .Input("segment_splits: int64")
    .Output("unique_ids: int64")
    .Output("unique_splits: int64")
    .Output("inverse: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));     // [N]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));  // [S+1]
      c->set_output(0, c->UnknownShapeOfRank(1));                // [U], data dependent
      c->set_output(1, splits);
      c->set_output(2, ids);
      return absl::OkStatus();
    })
    .Doc("Removes duplicate ids inside each segment (FusedRec, section 3, 'Embedding Deduplication').");

}  // namespace fusedrec
