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
    .Doc("Statistics by category, since the table was made or cleared.");

REGISTER_OP("Fusedrec>TableSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc("Number of rows of each segment.");

REGISTER_OP("Fusedrec>TableKeys")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("since: int64")
    .Output("ids: int64")
    .Output("handles: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc("Ids of a segment, in no meaningful order.");

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
    .Doc("Rows with optimizer slots and metadata, packed as hash_table/cpu/parts/row_records.h says.");

REGISTER_OP("Fusedrec>TableImport")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Input("records: uint8")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Inserts or overwrites rows with records of TableReadRecords, bit by bit.");

REGISTER_OP("Fusedrec>TableRemove")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Removes rows by id; skips ids without a row.");

REGISTER_OP("Fusedrec>TableEvict")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("count: int64")
    .Output("evicted: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Evicts the rows of a segment that the table's policy ranks lowest; rows of the last `window` lookups stay.");

REGISTER_OP("Fusedrec>TableTombstones")
    .Input("table: resource")
    .Input("segment: int64")
    .Output("ids: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc("Ids of a segment that were evicted or removed since TableForgetTombstones, and have not come back.");

REGISTER_OP("Fusedrec>TableForgetTombstones")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Begins a new record of tombstones and of the rows that may have changed.");

REGISTER_OP("Fusedrec>TableCandidates")
    .Input("table: resource")
    .Input("segment: int64")
    .Output("ids: int64")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn(VectorOutputs)
    .Doc("Ids that wait for admission and how often they came, in the order of their hash (Mix64).");

REGISTER_OP("Fusedrec>TableImportCandidates")
    .Input("table: resource")
    .Input("segment: int64")
    .Input("ids: int64")
    .Input("counts: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets how often ids without a row have come.");

REGISTER_OP("Fusedrec>TableClock")
    .Input("table: resource")
    .Output("clock: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    })
    .Doc("Number of training lookups, and version (number of changes).");

REGISTER_OP("Fusedrec>TableSetClock")
    .Input("table: resource")
    .Input("clock: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets the numbers that TableClock returns, after a checkpoint was read.");

REGISTER_OP("Fusedrec>TableClear")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Removes all rows, candidates, tombstones, statistics and waiting gradients.");

}  // namespace fusedrec
