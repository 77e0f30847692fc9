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
    .Doc(R"doc(
Finds the ids of each piece of a batch that no piece before holds, and the last piece that holds each id.

ids: <int64>[u_i] distinct ids of piece i, grouped by segment.
id_splits: <int64>[S+1] segment bounds inside ids of piece i.
new_ids: <int64>[n_i] grouped by segment, in the order of ids.
new_splits: <int64>[S+1] segment bounds inside new_ids of piece i.
numbers: <int32>[u_i] number of each id of piece i among the new ids of all pieces, one piece after another.
last: <int32>[U] last piece of each id, by number; U is the sum of all n_i.
)doc");

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
    .Doc(R"doc(
Says on the rank that asks where each id of a piece finds its row, and which gradients leave with which piece.

messages: <int64>[P_i] new ids of piece i, as RankPartition makes them; entries behind the last block are padding.
splits: <int32>[R] entries of each block of piece i.
restore: <int32>[n_i] from RankPartition of piece i.
numbers: <int32>[u_i] from WindowUnique.
last: <int32>[U] from WindowUnique.
rows: <int32>[u_i] row of each id of piece i among the rows of all pieces up to i, one piece after another.
marks: <int64>[Q] blocks [count | words] by owner, which tell the last piece of each new id.
marks_splits: <int32>[R] entries of each block of marks.
term_index: <int32>[k_i] ids that the gradients of piece i sum, by their place in all pieces, one piece after another.
term_splits: <int64>[e_i+1] gradient e sums term_index[term_splits[e]:term_splits[e+1]], in the order of pieces.
gradient_splits: <int32>[R] gradients that piece i sends to each owner.
num_segments: S.
)doc");

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
    .Doc(R"doc(
Says on the rank that owns rows which gradients come with each piece.

messages: <int64>[V_i + R * S] new ids of piece i from all ranks, blocks [counts[S] | ids].
splits: <int32>[R] entries of each block of piece i.
marks: <int64>[Q] the marks that the ranks made by WindowRoute.
marks_splits: <int32>[R] entries of each block of marks.
trained: <int64>[e_i + R * S] ids of the gradients of piece i in their order, blocks [counts[S] | ids] by source.
trained_splits: <int32>[R] entries of each block of trained.
rows: <int32>[e_i] place of each of these ids among the ids of all messages, one piece after another.
num_segments: S.
)doc");

}  // namespace fusedrec
