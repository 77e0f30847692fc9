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
    .Doc("Joins the messages of several lookups into one.");

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
    .Doc("Splits a received message into the messages that JoinMessages joined.");

}  // namespace fusedrec
