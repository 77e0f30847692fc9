// Ops outside the training step: contents of a table, checkpoints, upkeep.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

static absl::Status VectorOutputs(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->UnknownShapeOfRank(1));
  return absl::OkStatus();
}

REGISTER_OP("Fusedrec>TableStatistics")
    .Input("table: resource")
    .Output("segments: int64")
    .Output("bytes: int64")
    .Output("traffic: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 6));
      c->set_output(1, c->Vector(5));
      c->set_output(2, c->Matrix(c->UnknownDim(), 3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Statistics by category, since the table was made or cleared.

table: of HashTable.
segments: <int64>[S, 6] keys, hits (distinct rows found by training lookups), inserts, evictions, refused by admission,
  candidates for admission.
bytes: <int64>[5] of keys, of rows in memory and in the second pool (as mapped); number of rows in each of the pools.
traffic: <int64>[S, 3] of a GPU table with host_rows, since it was made, zeros otherwise: distinct rows of training lookups
  that the pool of hot rows had; bytes of records that went to the device, and back to host memory.
)doc");

REGISTER_OP("Fusedrec>TableSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc(R"doc(
Number of rows of each segment.

table: of HashTable.
size: <int64>[S].
)doc");

REGISTER_OP("Fusedrec>TableKeys")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("since: int64")
    .Output("ids: int64")
    .Output("handles: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc(R"doc(
Ids of a segment, in no meaningful order. The writer of a checkpoint sorts them.

table: of HashTable.
segment: <int64>[].
since: <int64>[2] an answer of TableClock: only rows that an update changed, or a training lookup touched, after it;
  [0, 0] for all.
ids: <int64>[n].
handles: <int64>[n] for TableReadRecords; they hold until the table changes.
)doc");

REGISTER_OP("Fusedrec>TableReadRecords")
    .Input("table: resource")
    .Input("handles: int64")
    .Output("records: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle handles;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &handles));
      c->set_output(0, c->Matrix(c->Dim(handles, 0), c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Rows with optimizer slots and metadata, packed (custom_ops/hash_table/cpu/parts/row_records.h has the layout). Export goes in batches.

table: of HashTable.
handles: <int64>[n] of TableKeys.
records: <uint8>[n, bytes].
)doc");

REGISTER_OP("Fusedrec>TableImport")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Input("records: uint8")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Inserts or overwrites rows with records of TableReadRecords, bit by bit.

table: of HashTable.
segment: <int64>[].
ids: <int64>[n] distinct.
records: <uint8>[n, bytes].
)doc");

REGISTER_OP("Fusedrec>TableRemove")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Removes rows by id; skips ids without a row.

table: of HashTable.
segment: <int64>[].
ids: <int64>[n].
removed: <int64>[] how many had a row.
)doc");

REGISTER_OP("Fusedrec>TableEvict")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("count: int64")
    .Output("evicted: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Evicts the rows of a segment that the table's policy ranks lowest; rows of the last `window` lookups stay.

table: of HashTable.
segment: <int64>[].
count: <int64>[] how many.
evicted: <int64>[] how many could go.
)doc");

REGISTER_OP("Fusedrec>TableTombstones")
    .Input("table: resource")
    .Input("segment: int64")
    .Output("ids: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc(R"doc(
Ids of a segment that were evicted or removed since TableForgetTombstones, and have not come back. Ascending.

table: of HashTable.
segment: <int64>[].
ids: <int64>[n].
)doc");

REGISTER_OP("Fusedrec>TableForgetTombstones")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Begins a new record of tombstones and of the rows that may have changed. A full checkpoint that deltas will follow calls
it. TableKeys since a later version then reads these rows only.

table: of HashTable.
)doc");

REGISTER_OP("Fusedrec>TableCandidates")
    .Input("table: resource")
    .Input("segment: int64")
    .Output("ids: int64")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc(R"doc(
Ids that wait for admission and how often they came, in the order of their hash (Mix64).

table: of HashTable.
segment: <int64>[].
ids: <int64>[n].
counts: <int64>[n].
)doc");

REGISTER_OP("Fusedrec>TableImportCandidates")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Input("counts: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sets how often ids without a row have come.

table: of HashTable.
segment: <int64>[].
ids: <int64>[n].
counts: <int64>[n].
)doc");

REGISTER_OP("Fusedrec>TableClock")
    .Input("table: resource")
    .Output("clock: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Number of training lookups, and version (number of changes).

table: of HashTable.
clock: <int64>[2].
)doc");

REGISTER_OP("Fusedrec>TableSetClock")
    .Input("table: resource")
    .Input("clock: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Sets the numbers that TableClock returns, after a checkpoint was read.

table: of HashTable.
clock: <int64>[2].
)doc");

REGISTER_OP("Fusedrec>TableClear")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Removes all rows, candidates, tombstones, statistics and waiting gradients.

table: of HashTable.
)doc");

}  // namespace fusedrec
