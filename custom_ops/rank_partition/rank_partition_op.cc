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
    .Doc(R"doc(
Packs unique ids into one message per owner rank (FusedRec, section 3, "Embedding Route").

A block of the message is [counts[S] | ids]: how many ids of each segment follow, then the ids, grouped by segment, in the
order of unique_ids. Blocks stand in rank order. The buffer is padded with zeros to a bucketed size (Horovod's response
cache is keyed on shapes); send_splits says what is real.

unique_ids: <int64>[U] distinct ids, grouped by segment.
unique_splits: <int64>[S+1] segment bounds inside unique_ids.
message: <int64>[P], P >= U + num_ranks * S.
send_splits: <int32>[R] entries of each owner's block, header included.
id_splits: <int32>[R] ids of each owner's block.
restore: <int32>[U] row of unique_ids[u] among the rows that come back in block order.
num_ranks: R.
owner: which rank owns an id. 'hash_range': the range of its 64-bit mix. 'tfra': TFRA's default partition function.
id_bits: ids must lie in [0, 2^id_bits); 64 admits every int64.
segment_names: names of the segments for messages; empty or one per segment.
)doc");

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
    .Doc(R"doc(
Reads the messages of RankPartition at the owner: ids of all sources, sorted by segment.

message: <int64>[V + R * S] blocks [counts[S] | ids], one per source, in rank order.
received_splits: <int32>[R] entries of each source's block, header included.
ids: <int64>[V] grouped by segment; inside a segment by source, in the order sent.
segment_splits: <int64>[S+1] segment s is ids[segment_splits[s]:segment_splits[s+1]].
position: <int32>[V] index into ids of the v-th id in order of arrival (headers not counted).
id_splits: <int32>[R] ids received from each source.
num_segments: S.
)doc");

}  // namespace fusedrec
