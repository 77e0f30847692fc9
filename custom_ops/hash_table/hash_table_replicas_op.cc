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
    .Doc(R"doc(
Notes for TableTakeUnsynced that the rows of these ids were trained.

table: of HashTable with averaged.
message: <int64>[V + R * S] of TableLookup.
received_splits: <int32>[R].
)doc");

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
    .Doc(R"doc(
Returns and forgets the ids that this replica trained or removed since the last call.

table: of HashTable with averaged.
message: <int64>[2 * S + n] counts[2 * S], then ids: by segment those that were trained and have a row, then by segment
  those that left and have none. Ascending inside a segment on the CPU; on a GPU the trained ids are in the order of rows.
headers: <int64>[n] last << 32 | count of rows that were trained, 0 of ids that left.
)doc");

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
    .Doc(R"doc(
Reads rows with optimizer slots as float32. An id without a row has its initial row and slots. Touches nothing.

table: of HashTable.
ids: <int64>[n] grouped by segment.
segment_splits: <int64>[S + 1].
numbers: <float>[P, k] row and slots of each id; P is n rounded up to a bucketed size, the rows behind n are 0.
)doc");

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
    .Doc(R"doc(
Brings this replica to the common state: removes ids, sets rows, and keeps to max_rows.

table: of HashTable with averaged.
left: <int64>[m] grouped by segment; rows that a training lookup holds stay.
left_splits: <int64>[S + 1].
ids: <int64>[n] distinct, grouped by segment. Rows that are there stay where they are, others are made.
segment_splits: <int64>[S + 1].
numbers: <float>[>= n, k] as of TableReadNumbers.
headers: <int64>[n] last << 32 | count. A row that was looked up later keeps its clock and the larger count.
step: <int64>[] seeds the rounding of 16-bit rows, the same at all replicas.
)doc");

}  // namespace fusedrec
