// The resource of a table, and the updates of its rows.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace fusedrec {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

static absl::Status GradientsShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));  // handles [W]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));  // inverse [V]
  TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &unused));  // grads [>= V, D]
  for (int i = 4; i < c->num_inputs(); ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  c->set_output(0, c->UnknownShapeOfRank(1));
  return absl::OkStatus();
}

REGISTER_OP("Fusedrec>HashTable")
    .Output("table: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("dim: int >= 1")
    .Attr("seeds: list(int) >= 1")
    .Attr("segment_names: list(string) = []")
    .Attr("storage: {'float32', 'bfloat16', 'float16'} = 'float32'")
    .Attr("stochastic_rounding: bool = false")
    .Attr("distribution: {'constant', 'uniform', 'normal', 'truncated_normal'} = 'constant'")
    .Attr("a: float = 0.0")
    .Attr("b: float = 0.0")
    .Attr("unknown: {'initial', 'zeros'} = 'initial'")
    .Attr("rule: string")
    .Attr("hyperparameters: list(float)")
    .Attr("max_rows: int >= 0 = 0")
    .Attr("eviction: {'none', 'lru', 'lfu'} = 'none'")
    .Attr("ttl: int >= 0 = 0")
    .Attr("admission_count: int >= 1 = 1")
    .Attr("max_candidates: int >= 0 = 0")
    .Attr("frequency_decay_steps: int >= 0 = 0")
    .Attr("segment_max_rows: list(int) = []")
    .Attr("segment_eviction: list(string) = []")
    .Attr("segment_ttl: list(int) = []")
    .Attr("segment_admission_count: list(int) = []")
    .Attr("segment_max_candidates: list(int) = []")
    .Attr("segment_frequency_decay_steps: list(int) = []")
    .Attr("record_tombstones: bool = false")
    .Attr("hot_after: int >= 0 = 0")
    .Attr("memory_budget: int >= 0 = 0")
    .Attr("tier_folder: string = ''")
    .Attr("window: int >= 1 = 1")
    .Attr("averaged: bool = false")
    .Attr("host_rows: bool = false")
    .Attr("hot_rows: int >= 0 = 0")
    .Attr("anonymous: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
A dynamic embedding table of S segments (tables of one group), which makes rows as ids come (MTGRBoost, section 4.1).

table: handle of the resource.
dim: D, columns of a row.
seeds: one per segment; the initial row is a pure function of (seed, id).
segment_names: names for error messages, one per segment, or none.
storage: type of rows in memory; element-wise optimizer slots of 16-bit tables are bfloat16.
stochastic_rounding: whether 16-bit storage rounds stochastically.
distribution: distribution of initial values, with parameters a and b (see InitialRows).
unknown: the row that TableFind returns for an id without one: its initial row, or zeros.
rule: name of the update rule; custom_ops/hash_table/cpu/rows/optimizer.h lists the rules.
hyperparameters: numbers of the rule, in the order of that list.
max_rows: limit of rows of each segment; 0 sets none.
eviction: the choice of the rows that leave at max_rows.
ttl: training lookups (ticks of the clock) after which an untouched row leaves; 0 for never.
admission_count: training lookups that must bring an id before it gets a row.
max_candidates: limit of the ids counted for admission, per segment; a lookup that ends beyond it halves all counts and
  forgets the ids that came once. 0 sets none.
frequency_decay_steps: training lookups after which the counts of rows, for 'lfu' and hot_after, are halved; 0 for never.
segment_max_rows, segment_eviction, segment_ttl, segment_admission_count, segment_max_candidates,
  segment_frequency_decay_steps: one value per segment in the place of the attribute without `segment_`; or none.
record_tombstones: whether the table remembers ids that left, for delta checkpoints.
hot_after: training lookups at which a row moves from float16 to float32; 0 keeps all rows in `storage`. A row whose count
  is halved below it moves back within frequency_decay_steps lookups.
memory_budget: bytes of rows in memory; 0 sets no limit. A file in tier_folder holds the rows beyond.
window: training lookups whose rows are neither evicted nor moved.
averaged: whether the table records what TableTakeUnsynced returns.
host_rows: rows in host memory, the rows of two batches on the device. Applies to GPU tables only.
hot_rows: with host_rows, rows that stay on the device over batches: the ones that lookups brought most often.
anonymous: each run makes a new table, which lives as long as a handle of it. shared_name is then unused.
)doc");

REGISTER_OP("Fusedrec>TableApplyGradients")
    .Input("table: resource")
    .Input("handles: int64")
    .Input("inverse: int32")
    .Input("grads: T")
    .Input("scale: float")
    .Input("learning_rate: float")
    .Input("step: int64")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(GradientsShape)
    .Doc(R"doc(
Sums gradients of equal rows over their sources, in the order received, and applies the table's optimizer in place.

A row whose sum holds a number that is not finite stays as it is, and so do its slots.

table: of HashTable.
handles: <int64>[W] of TableLookup.
inverse: <int32>[V] of TableLookup.
grads: <T>[>= V, D] in the order received; rows behind V are ignored.
scale: <float>[] factor of all gradients.
learning_rate: <float>[].
step: <int64>[] number of this update, 1 for the first.
left_out: <int32>[k] ascending places in `handles` of the rows that stay as they are. On a GPU, rows whose gradients are
  finite and whose sum is not stay as they are without a place here.
)doc");

REGISTER_OP("Fusedrec>TableAccumulateGradients")
    .Input("table: resource")
    .Input("handles: int64")
    .Input("inverse: int32")
    .Input("grads: T")
    .Input("scale: float")
    .Input("begin: bool")
    .Output("left_out: int32")
    .Attr("T: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(GradientsShape)
    .Doc(R"doc(
Adds gradients to sums by row, which TableApplyAccumulated applies (MTGRBoost, section 5.2).

table: of HashTable.
handles: <int64>[W] of TableLookup.
inverse: <int32>[V] of TableLookup.
grads: <T>[>= V, D] in the order received.
scale: <float>[] factor of all gradients.
begin: <bool>[] whether to drop earlier sums, which a training step that failed may have left.
left_out: <int32>[k] ascending places in `handles` of rows whose sum is no longer finite, each once in an update: that
  update leaves them as they are. On a GPU, rows whose gradients are finite have no place here.
)doc");

REGISTER_OP("Fusedrec>TableApplyAccumulated")
    .Input("table: resource")
    .Input("learning_rate: float")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Applies the optimizer to the rows with accumulated sums, and clears the sums.

table: of HashTable.
learning_rate: <float>[].
step: <int64>[] number of this update, 1 for the first.
)doc");

}  // namespace fusedrec
