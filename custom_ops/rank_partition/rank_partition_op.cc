#include "common/limits.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>RankPartition")
    .Input("unique_ids: int64")
    .Input("unique_splits: int64")
    .Output("message: int64")
    .Output("send_splits: int32")
    .Output("id_splits: int32")
    .Output("restore: int32")
    .Attr("num_ranks: int >= 1")
    .Attr("owner: {'hash_range', 'tfra'} = 'hash_range'")
    .Attr("id_bits: int >= 1 = 64")
    .Attr("segment_names: list(string) = []")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle ids, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));     // [U]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));  // [S+1]
      int64_t ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &ranks));
      TF_RETURN_IF_ERROR(RequireIn("num_ranks", ranks, 1, kMostRanks, "the number of ranks."));
      c->set_output(0, c->UnknownShapeOfRank(1));  // at least U + R * S, padded to a bucketed size
      c->set_output(1, c->Vector(ranks));
      c->set_output(2, c->Vector(ranks));
      c->set_output(3, ids);
      return absl::OkStatus();
    })
    .Doc("Packs unique ids into one message per owner rank (FusedRec, section 3, 'Embedding Route').");

REGISTER_OP("Fusedrec>UnpackMessage")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("ids: int64")
    .Output("segment_splits: int64")
    .Output("position: int32")
    .Output("id_splits: int32")
    .Attr("num_segments: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle message, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &message));  // [V + R * S]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));   // [R]
      int64_t segments;
      TF_RETURN_IF_ERROR(c->GetAttr("num_segments", &segments));
      TF_RETURN_IF_ERROR(RequireIn("num_segments", segments, 1, kMostSegments, "the number of tables."));
      const DimensionHandle num_ids = c->UnknownDim();
      c->set_output(0, c->Vector(num_ids));
      c->set_output(1, c->Vector(segments + 1));
      c->set_output(2, c->Vector(num_ids));
      c->set_output(3, splits);
      return absl::OkStatus();
    })
    .Doc("Reads the messages of RankPartition at the owner: ids of all sources, sorted by segment.");

}  // namespace fusedrec
