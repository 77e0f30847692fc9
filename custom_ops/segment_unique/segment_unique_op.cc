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
    .Doc(R"doc(
Removes duplicate ids inside each segment (FusedRec, section 3, "Embedding Deduplication").

ids: <int64>[N] ids of all segments, concatenated. Any value; negative ids are ordinary ids.
segment_splits: <int64>[S+1] segment s is ids[segment_splits[s]:segment_splits[s+1]].
unique_ids: <int64>[U] distinct ids, grouped by segment, in order of first occurrence.
unique_splits: <int64>[S+1] segment bounds inside unique_ids.
inverse: <int32>[N] unique_ids[inverse[n]] == ids[n].
)doc");

}  // namespace fusedrec
