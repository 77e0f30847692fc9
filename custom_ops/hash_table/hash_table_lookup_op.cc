// Ops that look up rows of a table: in training, in inference, and ahead of a training lookup.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The rows of a lookup, [unknown, D]. The attribute `dim` gives D, because shape functions cannot read the resource.
static absl::Status RowsShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));  // message [V + R * S]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));  // received_splits [R]
  int64_t dim;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  c->set_output(0, c->Matrix(c->UnknownDim(), c->MakeDim(dim)));
  return absl::OkStatus();
}

// The result of a look-ahead, at inputs 3 to 5.
static absl::Status AheadShapes(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &unused));  // rows_ahead [P, D]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &unused));  // handles_ahead [V]
  return c->WithRank(c->input(5), 1, &unused);               // mark [3]
}

REGISTER_OP("Fusedrec>TableLookup")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("rows: T")
    .Output("handles: int64")
    .Output("inverse: int32")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(RowsShape(c));
      c->set_output(1, c->UnknownShapeOfRank(1));
      c->set_output(2, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Deferred-hash lookup, training form (FusedRec, section 3, "Lossless Lookup"): only here does (segment, id) become a key.

The probe itself deduplicates the ids of all sources. Ids without a row get one.

table: of HashTable.
message: <int64>[V + R * S] blocks [counts[S] | ids] of R sources (see UnpackMessage).
received_splits: <int32>[R] entries of each block, header included.
rows: <T>[P, D] row of each id in the order received; P is V rounded up to a bucketed size, rows behind V are 0.
handles: <int64>[W] of the distinct rows; -1 for an id that admission refuses. They hold for `window` lookups.
inverse: <int32>[V] handles[inverse[v]] is the row of the v-th received id.
dim: D of the table.
)doc");

REGISTER_OP("Fusedrec>TableLookAhead")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("rows: T")
    .Output("handles: int64")
    .Output("mark: int64")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(RowsShape(c));
      c->set_output(1, c->UnknownShapeOfRank(1));
      c->set_output(2, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the rows that a coming TableRefresh of the same message will need (NestPipe, section IV). Changes nothing.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup.
received_splits: <int32>[R].
rows: <T>[P, D] row of each id that has one, see TableLookup; the others hold anything.
handles: <int64>[V] row of each received id; -1 where it has none.
mark: <int64>[3] state of the table at the look-ahead, and a fingerprint of the message.
dim: D of the table.

On a GPU `message` is in host memory. The table holds the rows that were read: `rows` and `handles` are empty, and `mark`
names them.
)doc");

REGISTER_OP("Fusedrec>TableRefresh")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Input("rows_ahead: T")
    .Input("handles_ahead: int64")
    .Input("mark: int64")
    .Output("rows: T")
    .Output("handles: int64")
    .Output("inverse: int32")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(RowsShape(c));
      TF_RETURN_IF_ERROR(AheadShapes(c));
      c->set_output(1, c->UnknownShapeOfRank(1));
      c->set_output(2, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Looks up as TableLookup does, but searches and copies only rows that are new or changed since a TableLookAhead.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup; that of the look-ahead.
received_splits: <int32>[R], that of the look-ahead.
rows_ahead: <T>[>= V, D] of the look-ahead; given on as `rows` without a copy where nobody else holds it.
handles_ahead: <int64>[V] of the look-ahead.
mark: <int64>[3] of the look-ahead.
rows: <T>[P, D], see TableLookup.
handles: <int64>[W], see TableLookup.
inverse: <int32>[V], see TableLookup.
dim: D of the table.
)doc");

REGISTER_OP("Fusedrec>TableFind")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("rows: T")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn(RowsShape)
    .Doc(R"doc(
Deferred-hash lookup, inference form: inserts and touches nothing. `unknown` of HashTable decides on ids without a row.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup.
received_splits: <int32>[R].
rows: <T>[P, D], see TableLookup.
dim: D of the table.
)doc");

REGISTER_OP("Fusedrec>TablePeek")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Input("rows_ahead: T")
    .Input("handles_ahead: int64")
    .Input("mark: int64")
    .Output("rows: T")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(AheadShapes(c));
      return RowsShape(c);
    })
    .Doc(R"doc(
Reads the rows that the next TableLookup of this message would answer. Changes nothing.

An id without a row, or whose row expires at that lookup, has its initial row, whatever `unknown` of HashTable says.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup.
received_splits: <int32>[R].
rows_ahead: <T>[>= V, D] of a look-ahead of this message, or [0, D] without one.
handles_ahead: <int64>[V] of the look-ahead, or [0].
mark: <int64>[3] of the look-ahead, or any.
rows: <T>[P, D], see TableLookup.
dim: D of the table.
)doc");

REGISTER_OP("Fusedrec>TableTouch")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("handles: int64")
    .Output("inverse: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
      c->set_output(0, c->UnknownShapeOfRank(1));
      c->set_output(1, c->UnknownShapeOfRank(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Changes the table as TableLookup does, and reads no rows: TablePeek is for rows that somebody needs.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup.
received_splits: <int32>[R].
handles: <int64>[W], see TableLookup.
inverse: <int32>[V], see TableLookup.
)doc");

REGISTER_OP("Fusedrec>TablePrefetch")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Asks the disk for the rows of a coming lookup that lie beyond the memory budget (NestPipe, section IV). Does not wait.

table: of HashTable.
message: <int64>[V + R * S], see TableLookup.
received_splits: <int32>[R].
)doc");

}  // namespace fusedrec
