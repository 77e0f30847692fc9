#include "common/limits.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>JoinMessages")
    .Input("messages: num_messages * int64")
    .Input("splits: num_messages * int32")
    .Output("joined: int64")
    .Output("joined_splits: int32")
    .Attr("num_messages: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t messages;
      TF_RETURN_IF_ERROR(c->GetAttr("num_messages", &messages));
      ShapeHandle unused, ranks = c->UnknownShapeOfRank(1);
      for (int64_t i = 0; i < messages; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
        TF_RETURN_IF_ERROR(c->Merge(c->input(messages + i), ranks, &ranks));
      }
      c->set_output(0, c->UnknownShapeOfRank(1));  // the sum of all splits, padded to a bucketed size
      c->set_output(1, ranks);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Joins the messages of several lookups into one. Each rank's block holds its blocks of all messages, in their order.

messages: <int64>[P_i] blocks for each rank, as RankPartition makes them; entries behind the last block are padding.
splits: <int32>[R] entries of each block of message i.
joined: <int64>[P] padded with zeros to a bucketed size.
joined_splits: <int32>[R] entries of each joined block.
)doc");

REGISTER_OP("Fusedrec>SplitMessages")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("messages: num_messages * int64")
    .Output("lengths: num_messages * int32")
    .Attr("num_messages: int >= 1")
    .Attr("segments: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t messages;
      TF_RETURN_IF_ERROR(c->GetAttr("num_messages", &messages));
      ShapeHandle unused, ranks;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &ranks));
      for (int64_t i = 0; i < messages; ++i) {
        c->set_output(i, c->UnknownShapeOfRank(1));
        c->set_output(messages + i, ranks);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Splits a received message into the messages that JoinMessages joined. The headers of counts give the lengths of blocks.

message: <int64>[P] joined blocks of all sources, in rank order, not padded.
splits: <int32>[R] entries of each source's block.
messages: <int64>[V_i + R * S_i] blocks [counts[S_i] | ids] by source, not padded.
lengths: <int32>[R] entries of each block of message i.
segments: [num_messages] tables of each lookup, S_i.
)doc");

}  // namespace fusedrec
