// The ops of a table. kernels/ has their kernels.
#include "common/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"

namespace fusedrec {

REGISTER_OP("Fusedrec>HashTable")
    .Output("table: resource")
    .Attr("container: string = ''").Attr("shared_name: string = ''").Attr("anonymous: bool = false")
    .Attr("tables: list(string)")  // options.h
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("A dynamic embedding table of S segments (tables of one group), which makes rows as ids come (MTGRBoost, section 4.1).");

#define FUSEDREC_TABLE_OP(name) REGISTER_OP(name).Input("table: resource").SetIsStateful()

// A lookup that a look-ahead may have begun. `dim` gives the static shape, because shape functions cannot read the resource.
#define FUSEDREC_LOOKUP_OP(name)                                                                                     \
  FUSEDREC_TABLE_OP(name)                                                                                            \
      .Input("message: int64").Input("received_splits: int32").Input("rows_ahead: A").Input("handles_ahead: N * int64") \
      .Input("mark: N * int64")                                                                                      \
      .Output("rows: T")                                                                                             \
      .Attr("T: {float, half, bfloat16} = DT_FLOAT").Attr("dim: int >= 1")                                           \
      .Attr("A: list({float, half, bfloat16}) >= 0").Attr("N: int >= 0")

FUSEDREC_LOOKUP_OP("Fusedrec>TableLookup")
    .Input("sum_index: K * int32").Input("sum_splits: K * int64").Attr("K: int >= 0 = 0")
    .Output("handles: int64").Output("inverse: int32")
    .Attr("read_rows: bool = true")
    .Attr("window: int >= 1 = 1")
    .SetShapeFn(Shapes("* [m] [r] A*[p,d] N*[w] N*[k] K*[t] K*[q] -> [0 unless read_rows,dim] [?] [?]"))
    .Doc("Deferred-hash lookup, training form (FusedRec, section 3). Returns rows, or the sums of PartialSumTerms. With a TableLookAhead of the message, it reads only rows that are new or changed since. Rows of the last `window` lookups, this one included, are neither evicted nor moved until the next lookup.");

FUSEDREC_TABLE_OP("Fusedrec>TableLookAhead")
    .Input("message: int64").Input("received_splits: int32")
    .Output("rows: T").Output("handles: int64").Output("mark: int64")
    .Attr("T: {float, half, bfloat16} = DT_FLOAT").Attr("dim: int >= 1")
    .SetShapeFn(Shapes("* [m] [r] -> [?,dim] [?] [3]"))
    .Doc("Reads the rows that a coming TableLookup of the same message will need (NestPipe, section IV).");

FUSEDREC_LOOKUP_OP("Fusedrec>TableRead")
    .Attr("window: int >= 0 = 0")
    .SetShapeFn(Shapes("* [m] [r] A*[p,d] N*[w] N*[k] -> [?,dim]"))
    .Doc("Deferred-hash lookup, inference form, which inserts and touches nothing; with a window, the rows that the next TableLookup of this window would return.");

FUSEDREC_TABLE_OP("Fusedrec>TablePrefetch")
    .Input("message: int64").Input("received_splits: int32")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Asks the disk for the rows of a coming lookup that lie beyond the memory budget (NestPipe, section IV).");

FUSEDREC_TABLE_OP("Fusedrec>TableApplyGradients")
    .Input("handles: int64").Input("inverse: int32").Input("grads: T").Input("scale: float")
    .Input("learning_rate: float").Input("step: int64").Input("begin: bool")
    .Input("sum_index: K * int32").Input("sum_splits: K * int64").Attr("K: int >= 0 = 0")
    .Input("coming: C * int32").Attr("C: int >= 0 = 0")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn(Shapes("* [w] [v] [g,d] [] [] [] [] K*[t] K*[q] C*[c] -> [?]"))
    .Doc("Sums gradients of equal rows over their sources, in the order received, and applies the table's optimizer in place.");

FUSEDREC_TABLE_OP("Fusedrec>TableAccumulateGradients")
    .Input("handles: int64").Input("inverse: int32").Input("grads: T").Input("scale: float").Input("begin: bool")
    .Input("sum_index: K * int32").Input("sum_splits: K * int64").Attr("K: int >= 0 = 0")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetShapeFn(Shapes("* [w] [v] [g,d] [] [] K*[t] K*[q] -> [?]"))
    .Doc("Adds gradients to sums by row, which TableApplyAccumulated applies (MTGRBoost, section 5.2).");

FUSEDREC_TABLE_OP("Fusedrec>TableApplyAccumulated")
    .Input("learning_rate: float").Input("step: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Applies the optimizer to the rows with accumulated sums, and clears the sums.");

FUSEDREC_TABLE_OP("Fusedrec>TableStatistics")
    .Output("segments: int64").Output("bytes: int64").Output("traffic: int64")
    .SetShapeFn(Shapes("* -> [?,6] [5] [?,3]"))
    .Doc("Statistics by category, since the table was made or cleared.");

FUSEDREC_TABLE_OP("Fusedrec>TableKeys")
    .Input("segment: int64").Input("since: int64")
    .Output("ids: int64").Output("handles: int64")
    .SetShapeFn(Shapes("* * * -> [?] [?]"))
    .Doc("Ids of a segment, in no meaningful order.");

FUSEDREC_TABLE_OP("Fusedrec>TableReadRecords")
    .Input("handles: int64")
    .Output("records: uint8")
    .SetShapeFn(Shapes("* [h] -> [h,?]"))
    .Doc("Rows with optimizer slots and metadata, packed as hash_table/cpu/parts/row_records.h says.");

FUSEDREC_TABLE_OP("Fusedrec>TableImport")
    .Input("segment: int64").Input("ids: int64").Input("records: uint8")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Inserts or overwrites rows with records of TableReadRecords, bit by bit.");

FUSEDREC_TABLE_OP("Fusedrec>TableRemove")
    .Input("segment: int64").Input("ids: int64")
    .Output("removed: int64")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Removes rows by id; skips ids without a row.");

FUSEDREC_TABLE_OP("Fusedrec>TableEvict")
    .Input("segment: int64").Input("count: int64")
    .Output("evicted: int64")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Evicts the rows of a segment that the table's policy ranks lowest; rows of the last `window` lookups stay.");

FUSEDREC_TABLE_OP("Fusedrec>TableTombstones")
    .Input("segment: int64")
    .Output("ids: int64")
    .SetShapeFn(Shapes("* * -> [?]"))
    .Doc("Ids of a segment that were evicted or removed since TableForgetTombstones, and have not come back.");

FUSEDREC_TABLE_OP("Fusedrec>TableForgetTombstones")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Begins a new record of tombstones and of the rows that may have changed.");

FUSEDREC_TABLE_OP("Fusedrec>TableCandidates")
    .Input("segment: int64")
    .Output("ids: int64").Output("counts: int64")
    .SetShapeFn(Shapes("* * -> [?] [?]"))
    .Doc("Ids that wait for admission and how often they came, in the order of their hash (Mix64).");

FUSEDREC_TABLE_OP("Fusedrec>TableImportCandidates")
    .Input("segment: int64").Input("ids: int64").Input("counts: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets how often ids without a row have come.");

FUSEDREC_TABLE_OP("Fusedrec>TableClock")
    .Output("clock: int64")
    .SetShapeFn(Shapes("* -> [2]"))
    .Doc("Number of training lookups, and version (number of changes).");

FUSEDREC_TABLE_OP("Fusedrec>TableSetClock")
    .Input("clock: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets the numbers that TableClock returns, after a checkpoint was read.");

FUSEDREC_TABLE_OP("Fusedrec>TableClear")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Removes all rows, candidates, tombstones, statistics and waiting gradients.");

FUSEDREC_TABLE_OP("Fusedrec>TableNoteTrained")
    .Input("message: int64").Input("received_splits: int32")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Notes for TableTakeUnsynced that the rows of these ids were trained.");

FUSEDREC_TABLE_OP("Fusedrec>TableTakeUnsynced")
    .Output("message: int64").Output("headers: int64")
    .SetShapeFn(Shapes("* -> [?] [?]"))
    .Doc("Returns and forgets the ids that this replica trained or removed since the last call.");

FUSEDREC_TABLE_OP("Fusedrec>TableReadNumbers")
    .Input("ids: int64").Input("segment_splits: int64")
    .Output("numbers: float")
    .SetShapeFn(Shapes("* * * -> [?,?]"))
    .Doc("Reads rows with optimizer slots as float32.");

FUSEDREC_TABLE_OP("Fusedrec>TableMerge")
    .Input("left: int64").Input("left_splits: int64").Input("ids: int64").Input("segment_splits: int64")
    .Input("numbers: float").Input("headers: int64").Input("step: int64")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Brings this replica to the common state: removes ids, sets rows, and keeps to max_rows_per_rank.");

}  // namespace fusedrec
