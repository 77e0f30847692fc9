// Ops of replicas that train apart and are averaged from time to time (replicas.h).
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Fusedrec>TableNoteTrained")
    .Input("table: resource")
    .Input("message: int64")
    .Input("received_splits: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Notes for TableTakeUnsynced that the rows of these ids were trained.");

REGISTER_OP("Fusedrec>TableTakeUnsynced")
    .Input("table: resource")
    .Output("message: int64")
    .Output("headers: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc("Returns and forgets the ids that this replica trained or removed since the last call.");

REGISTER_OP("Fusedrec>TableReadNumbers")
    .Input("table: resource")
    .Input("ids: int64")
    .Input("segment_splits: int64")
    .Output("numbers: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc("Reads rows with optimizer slots as float32.");

REGISTER_OP("Fusedrec>TableMerge")
    .Input("table: resource")
    .Input("left: int64")
    .Input("left_splits: int64")
    .Input("ids: int64")
    .Input("segment_splits: int64")
    .Input("numbers: float")
    .Input("headers: int64")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Brings this replica to the common state: removes ids, sets rows, and keeps to max_rows.");

}  // namespace fusedrec
