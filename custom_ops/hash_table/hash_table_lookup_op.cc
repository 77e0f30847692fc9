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
    .Doc("Deferred-hash lookup, training form (FusedRec, section 3, 'Lossless Lookup').");

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
    .Doc("Reads the rows that a coming TableRefresh of the same message will need (NestPipe, section IV).");

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
    .Doc("Looks up as TableLookup does, but searches and copies only rows that are new or changed since a TableLookAhead.");

REGISTER_OP("Fusedrec>TableFind")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .Output("rows: T")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn(RowsShape)
    .Doc("Deferred-hash lookup, inference form: inserts and touches nothing.");

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
    .Doc("Reads the rows that the next TableLookup of this message would answer.");

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
    .Doc("Changes the table as TableLookup does, and reads no rows: TablePeek is for rows that somebody needs.");

REGISTER_OP("Fusedrec>TablePrefetch")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Asks the disk for the rows of a coming lookup that lie beyond the memory budget (NestPipe, section IV).");

}  // namespace fusedrec
