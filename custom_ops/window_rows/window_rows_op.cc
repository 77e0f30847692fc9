#include "common/limits.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// M lists of vectors begin at input `first`.
absl::Status RequireVectors(InferenceContext* c, int64_t first, int64_t end) {
  ShapeHandle unused;
  for (int64_t i = first; i < end; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("Fusedrec>WindowUnique")
    .Input("ids: num_pieces * int64")
    .Input("id_splits: num_pieces * int64")
    .Output("new_ids: num_pieces * int64")
    .Output("new_splits: num_pieces * int64")
    .Output("numbers: num_pieces * int32")
    .Output("last: int32")
    .Attr("num_pieces: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t pieces;
      TF_RETURN_IF_ERROR(c->GetAttr("num_pieces", &pieces));
      TF_RETURN_IF_ERROR(RequireVectors(c, 0, 2 * pieces));
      for (int64_t i = 0; i < pieces; ++i) {
        c->set_output(i, c->UnknownShapeOfRank(1));
        c->set_output(pieces + i, c->input(pieces + i));
        c->set_output(2 * pieces + i, c->input(i));
      }
      c->set_output(3 * pieces, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc("Finds the ids of each piece of a batch that no piece before holds, and the last piece that holds each id.");

REGISTER_OP("Fusedrec>WindowRoute")
    .Input("messages: num_pieces * int64")
    .Input("splits: num_pieces * int32")
    .Input("restore: num_pieces * int32")
    .Input("numbers: num_pieces * int32")
    .Input("last: int32")
    .Output("rows: num_pieces * int32")
    .Output("marks: int64")
    .Output("marks_splits: int32")
    .Output("term_index: num_pieces * int32")
    .Output("term_splits: num_pieces * int64")
    .Output("gradient_splits: num_pieces * int32")
    .Attr("num_pieces: int >= 1")
    .Attr("num_segments: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t pieces;
      TF_RETURN_IF_ERROR(c->GetAttr("num_pieces", &pieces));
      TF_RETURN_IF_ERROR(RequireVectors(c, 0, 4 * pieces + 1));
      for (int64_t i = 0; i < pieces; ++i) {
        c->set_output(i, c->input(3 * pieces + i));
        c->set_output(pieces + 2 + i, c->UnknownShapeOfRank(1));
        c->set_output(2 * pieces + 2 + i, c->UnknownShapeOfRank(1));
        c->set_output(3 * pieces + 2 + i, c->input(pieces + i));
      }
      c->set_output(pieces, c->UnknownShapeOfRank(1));
      c->set_output(pieces + 1, c->input(pieces));
      return absl::OkStatus();
    })
    .Doc("Says on the rank that asks where each id of a piece finds its row, and which gradients leave with which piece.");

REGISTER_OP("Fusedrec>WindowGradients")
    .Input("messages: num_pieces * int64")
    .Input("splits: num_pieces * int32")
    .Input("marks: int64")
    .Input("marks_splits: int32")
    .Output("trained: num_pieces * int64")
    .Output("trained_splits: num_pieces * int32")
    .Output("rows: num_pieces * int32")
    .Attr("num_pieces: int >= 1")
    .Attr("num_segments: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t pieces;
      TF_RETURN_IF_ERROR(c->GetAttr("num_pieces", &pieces));
      TF_RETURN_IF_ERROR(RequireVectors(c, 0, 2 * pieces + 2));
      for (int64_t i = 0; i < pieces; ++i) {
        c->set_output(i, c->UnknownShapeOfRank(1));
        c->set_output(pieces + i, c->input(pieces + i));
        c->set_output(2 * pieces + i, c->UnknownShapeOfRank(1));
      }
      return absl::OkStatus();
    })
    .Doc("Says on the rank that owns rows which gradients come with each piece.");

}  // namespace fusedrec
