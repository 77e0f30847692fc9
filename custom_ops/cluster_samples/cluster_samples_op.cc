#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Fusedrec>ClusterSamples")
    .Input("ids: num_features * int64")
    .Input("row_splits: num_features * int64")
    .Input("sizes: int64")
    .Output("order: int64")
    .Attr("num_features: int >= 1")
    .Attr("tables: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t features;
      TF_RETURN_IF_ERROR(c->GetAttr("num_features", &features));
      ShapeHandle unused, splits = c->UnknownShapeOfRank(1);
      for (int64_t f = 0; f < features; ++f) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(f), 1, &unused));
        // Sizes that differ are the kernel's to refuse, because its message names them.
        TF_RETURN_IF_ERROR(c->WithRank(c->input(features + f), 1, &splits));
      }
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * features), 1, &unused));
      DimensionHandle samples = c->UnknownDim();
      if (c->ValueKnown(c->Dim(splits, 0)) && c->Value(c->Dim(splits, 0)) > 0) {
        TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &samples));
      }
      c->set_output(0, c->Vector(samples));
      return absl::OkStatus();
    })
    .Doc("Orders the samples of a batch so that its micro-batches share few ids (NestPipe, section V.C).");

}  // namespace fusedrec
