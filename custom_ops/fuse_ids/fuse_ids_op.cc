#include "common/limits.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>FuseIds")
    .Input("ids: num_features * int64")
    .Input("row_splits: num_ragged * int64")
    .Output("fused: int64")
    .Output("segment_splits: int64")
    .Output("bag_splits: int64")
    .Output("bag_scale: float")
    .Output("feature_bags: int64")
    .Attr("num_features: int >= 1")
    .Attr("num_ragged: int >= 0")
    .Attr("num_segments: int >= 1")
    .Attr("segments: list(int)")
    .Attr("ragged_features: list(int)")
    .Attr("feature_names: list(string)")
    .Attr("bag_sizes: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t features, segments;
      TF_RETURN_IF_ERROR(c->GetAttr("num_features", &features));
      TF_RETURN_IF_ERROR(c->GetAttr("num_segments", &segments));
      TF_RETURN_IF_ERROR(RequireIn("num_segments", segments, 1, kMostSegments, "the number of tables."));
      ShapeHandle unused;
      for (int i = 0; i < c->num_inputs(); ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      c->set_output(0, c->UnknownShapeOfRank(1));
      c->set_output(1, c->Vector(segments + 1));
      c->set_output(2, c->UnknownShapeOfRank(1));
      c->set_output(3, c->UnknownShapeOfRank(1));
      c->set_output(4, c->Vector(features));
      return absl::OkStatus();
    })
    .Doc("Concatenates the ids of a group's features, segment by segment (FusedRec, section 3, 'Embedding Fusion').");

}  // namespace fusedrec
