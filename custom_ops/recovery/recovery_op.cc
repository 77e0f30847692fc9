#include "common/limits.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The rows of a gradient, where input `index` is known when the graph is made; padding changes them.
static absl::Status NumRows(InferenceContext* c, int index, bool pad, DimensionHandle* num_rows) {
  const tensorflow::Tensor* known = c->input_tensor(index);
  if (known != nullptr) {
    const int64_t rows = known->scalar<int64_t>()();
    TF_RETURN_IF_ERROR(RequireIn("num_rows", rows, 0, kMostPositions, "the number of rows that were read from."));
  }
  return pad ? absl::OkStatus() : c->MakeDimForScalarInput(index, num_rows);
}

REGISTER_OP("Fusedrec>Recover")
    .Input("rows: T")
    .Input("index: int32")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("pad: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, index;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));   // [P, D]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &index));  // [N]
      bool pad;
      TF_RETURN_IF_ERROR(c->GetAttr("pad", &pad));
      c->set_output(0, c->Matrix(pad ? c->UnknownDim() : c->Dim(index, 0), c->Dim(rows, 1)));
      return absl::OkStatus();
    })
    .Doc("Brings rows to where they are used: out[n] = rows[index[n]] (FusedRec, section 3, 'Embedding Recovery').");

REGISTER_OP("Fusedrec>RecoverGrad")
    .Input("grads: T")
    .Input("index: int32")
    .Input("num_rows: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("pad: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle grads, index, scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &grads));  // [>= N, D]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &index));  // [N]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &scalar));
      bool pad;
      TF_RETURN_IF_ERROR(c->GetAttr("pad", &pad));
      DimensionHandle num_rows = c->UnknownDim();
      TF_RETURN_IF_ERROR(NumRows(c, 2, pad, &num_rows));
      c->set_output(0, c->Matrix(num_rows, c->Dim(grads, 1)));
      return absl::OkStatus();
    })
    .Doc("Gradient of Recover, deterministic: sums in the order of the occurrences.");

REGISTER_OP("Fusedrec>PooledRecover")
    .Input("rows: T")
    .Input("index: int32")
    .Input("bag_splits: int64")
    .Input("bag_scale: float")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, scale, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));    // [P, D]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));  // [N]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));  // [G+1]
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &scale));   // [G]
      c->set_output(0, c->Matrix(c->Dim(scale, 0), c->Dim(rows, 1)));
      return absl::OkStatus();
    })
    .Doc("Brings rows to where they are used and pools them by bag.");

REGISTER_OP("Fusedrec>PooledRecoverParts")
    .Input("rows: num_parts * T")
    .Input("index: int32")
    .Input("bag_splits: int64")
    .Input("bag_scale: float")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("num_parts: int >= 1")
    .Attr("pad: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t parts;
      TF_RETURN_IF_ERROR(c->GetAttr("num_parts", &parts));
      ShapeHandle rows, scale, unused;
      DimensionHandle columns = c->UnknownDim();
      for (int64_t i = 0; i < parts; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &rows));  // [P_i, D]
        TF_RETURN_IF_ERROR(c->Merge(columns, c->Dim(rows, 1), &columns));
      }
      for (int64_t i = parts; i < parts + 2; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(parts + 2), 1, &scale));  // [G]
      bool pad;
      TF_RETURN_IF_ERROR(c->GetAttr("pad", &pad));
      c->set_output(0, c->Matrix(pad ? c->UnknownDim() : c->Dim(scale, 0), columns));
      return absl::OkStatus();
    })
    .Doc("PooledRecover from rows that lie in several parts.");

REGISTER_OP("Fusedrec>PooledRecoverGrad")
    .Input("grads: T")
    .Input("index: int32")
    .Input("bag_splits: int64")
    .Input("bag_scale: float")
    .Input("num_rows: int64")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("pad: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle grads, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &grads));  // [G, D]
      for (int i = 1; i < 4; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 0, &unused));
      bool pad;
      TF_RETURN_IF_ERROR(c->GetAttr("pad", &pad));
      DimensionHandle num_rows = c->UnknownDim();
      TF_RETURN_IF_ERROR(NumRows(c, 4, pad, &num_rows));
      c->set_output(0, c->Matrix(num_rows, c->Dim(grads, 1)));
      return absl::OkStatus();
    })
    .Doc("Gradient of PooledRecover, deterministic: sums in the order of the occurrences.");

}  // namespace fusedrec
