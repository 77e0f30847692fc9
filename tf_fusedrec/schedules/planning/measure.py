"""Measures the real model for a planner: the ids of a sample, and the times of a step's parts on this machine.

Nothing of the model changes. Dense compute runs forward and backward on rows that are handed in, and no optimizer runs.
Its weights and the states of its metrics are put back afterwards, since layers such as batch normalization change
theirs in a forward pass. Lookups and updates run on scratch tables with the configs of the model's own. The model's own
tables are read by a look-ahead, which changes nothing: large tables, and tables in files, take longer than scratch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras, keras_api, tf, unconverted
from tf_fusedrec.data.batches import cut, num_samples
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.embedding import Lookup as StepLookup
from tf_fusedrec.exchange.routing import own_message
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules.planned_calls import plan_step, required_embeddings, running
from tf_fusedrec.schedules.uneven_batches import WHOLE, working_on
from tf_fusedrec.tables import places

REPEATS = 3


class Lookup(NamedTuple):
    """One lookup of a step, in every micro-batch: what it sends."""

    unique: tuple[int, ...]  # distinct ids of each micro-batch
    new: tuple[int, ...]  # of these, ids in no earlier micro-batch: their rows travel with it
    ended: tuple[int, ...]  # of these, ids in no later micro-batch: their gradients travel with it
    tables: int  # S
    dim: int
    number_bytes: int  # of a number of a row on the wire, unless a wire_dtype is narrower
    state_bytes: int  # of a row with its optimizer slots in memory
    pools: bool = False  # True if its owners can return sums of rows


class Measured(NamedTuple):
    """Seconds of the parts of a step of one batch, on one rank, without exchanges."""

    samples: int  # B
    prepare: float  # duplicates removed, ids sorted by owner
    lookup: float  # distinct ids found, rows copied
    update: float  # gradients summed, optimizer
    compute: float  # forward and backward pass of the batch, rows put into the order of ids included
    half_compute: float  # the same of the first half of the batch
    dense_bytes: int  # of dense gradients


def lookups_of(model: Any, sample: Any, micro_batches: int) -> list[Lookup]:
    """Returns the lookups that a step of `sample` makes, in the order of their exchanges. Eager."""
    pieces = cut(sample, micro_batches)
    planned = plan_step(model, pieces).lookups
    calls = len(planned) // micro_batches
    return [_lookup(planned[i::calls]) for i in range(calls)]


def _lookup(micro_batches: Sequence[StepLookup]) -> Lookup:
    group = micro_batches[0].group
    narrow = micro_batches[0].narrow_dtype
    unique = [ops.segment_unique(lookup.fused.ids, lookup.fused.segment_splits) for lookup in micro_batches]
    window = ops.window_unique(unique)
    return Lookup(
        unique=tuple(int(tf.size(piece.ids)) for piece in unique),
        new=tuple(int(tf.size(ids)) for ids, _ in window.new),
        ended=tuple(np.bincount(window.last, minlength=len(unique)).tolist()),
        tables=len(group.config.tables),
        dim=group.config.tables[0].dim,
        number_bytes=(group.dtype if narrow is None else narrow).size,
        state_bytes=group.table.row_bytes,
        pools=group.pools,
    )


def measure(model: Any, sample: Any, ranks: int) -> Measured:
    """Times the parts of a step: two steps of dense compute, and the ops of its lookups on `ranks` owners. Eager.

    Raises ValueError if the model has no loss.
    """
    # Makes its weights. `built` does not tell, because models set it and layers are built at a call.
    model(keras.utils.unpack_x_y_sample_weight(sample)[0], training=False)
    first_half = cut(sample, 2)[0] if int(num_samples(sample)) > 1 else sample
    with unchanged(model):
        compute, half = (_compute_s(model, data) for data in (sample, first_half))
    planned = plan_step(model, [sample])
    parts = {"prepare": 0.0, "lookup": 0.0, "update": 0.0, "recover": 0.0}
    for embedding in required_embeddings(model):
        scratch = _scratch(embedding)
        for lookup in planned.lookups:
            if lookup.group in embedding.internals.groups:
                table = scratch.internals.groups[embedding.internals.groups.index(lookup.group)].table
                for name, seconds in _table_seconds(lookup, table, ranks).items():
                    parts[name] += seconds
    recover = parts.pop("recover")
    anchors = {id(weight) for embedding in required_embeddings(model) for weight in embedding.weights}
    dense = [weight for weight in model.trainable_variables if id(weight) not in anchors]
    return Measured(
        samples=int(num_samples(sample)),
        compute=compute + recover,
        half_compute=half + recover / 2,
        dense_bytes=sum(int(np.prod(weight.shape)) * keras_api.tf_variable(weight).dtype.size for weight in dense),
        **parts,
    )


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Puts weights, and states of metrics, back as they were before."""
    weights = [*model.weights, *(variable for metric in model.metrics for variable in metric.variables)]
    variables = [keras_api.tf_variable(weight) for weight in weights]  # an assignment to an Anchor would load its rows
    before = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before):
            variable.assign(value)


def _compute_s(model: Any, data: Any) -> float:
    """Seconds of a forward and a backward pass. Rows are handed in and their gradients are dropped."""
    shapes = [_row_shape(lookup) for lookup in plan_step(model, [data]).lookups]
    rows = [tf.cast(tf.random.stateless_normal(shape, [1, 2], stddev=0.02), dtype) for shape, dtype in shapes]

    def passes(data: Any, rows: list[tf.Tensor]) -> list[tf.Tensor]:
        planned = plan_step(model, [data])
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with working_on(model, WHOLE), running(model, planned, rows) as run:
            dropped = run.keep_gradients()
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = model.compute_loss(x, y, y_pred, sample_weight)
            if loss is None:
                raise ValueError(f"plan got the model {model.name!r} without a loss. Use compile(loss=...).")
            gradients = [part for part in tape.gradient(loss, model.trainable_variables) if part is not None]
        # All are results, because TensorFlow removes ops with unread results, control dependencies or not.
        return [loss, *tf.nest.flatten(gradients, expand_composites=True), *dropped.values()]

    function = tf.function(unconverted(passes))
    return _median_s(lambda: function(data, rows)[0].numpy())


def _row_shape(lookup: StepLookup) -> tuple[list[int], tf.DType]:
    """The shape of the rows that the model gets for a lookup, and their dtype."""
    return [int(tf.size(lookup.fused.bag_scale)), lookup.group.config.tables[0].dim], tf.as_dtype(lookup.output_dtype)


def _scratch(embedding: FusedEmbedding) -> FusedEmbedding:
    """A layer of empty tables with the configs of another one's, in memory and in one group of ranks."""
    config = FusedEmbedding.get_config(embedding)  # also of an Embedding, whose own config is shorter
    in_memory = {"memory_budget_per_rank": 0, "folder": ""}
    tables = [{**table, "tier": {**table["tier"], **in_memory}} for table in config["tables"]]
    fields = {"tables": tables, "topology": Topology().to_dict(), "name": f"{embedding.name}_scratch"}
    on_cpu = all(getattr(group.table, "place", places.CPU) is places.CPU for group in embedding.internals.groups)
    with tf.device("/CPU:0" if on_cpu else None):
        return FusedEmbedding.from_config({**config, **fields})


def _table_seconds(lookup: StepLookup, table: Any, ranks: int) -> dict[str, float]:
    """Seconds of the ops of one lookup of a batch on a scratch table."""
    fused = lookup.fused
    unique = ops.segment_unique(fused.ids, fused.segment_splits)
    message = own_message(unique.ids, unique.splits)
    rows = table.lookup(message)
    num_unique = tf.size(unique.ids, out_type=tf.int64)
    bags = (fused.bag_splits, fused.bag_scale)
    unique_rows = rows.rows[: tf.size(unique.ids)]
    gradients = tf.zeros_like(unique_rows)

    def prepare() -> Any:
        ids = ops.segment_unique(fused.ids, fused.segment_splits)
        return table.partition(ids.ids, ids.splits, num_ranks=ranks).message

    def recover() -> Any:
        pooled = ops.pooled_recover(unique_rows, unique.inverse, *bags)
        return ops.pooled_recover_grad(pooled, unique.inverse, *bags, num_unique)

    def look_up() -> Any:
        return table.lookup(message)

    def look_up_and_update() -> None:
        table.update([(look_up(), gradients, None)], 1.0)

    def look_ahead() -> Any:
        return lookup.group.table.look_ahead(message)

    lookup_s, both_s = _median_s(look_up), _median_s(look_up_and_update)
    return {
        "prepare": _median_s(prepare),
        "lookup": max(lookup_s, _median_s(look_ahead)),
        "update": max(both_s - lookup_s, 0.0),
        "recover": _median_s(recover),
    }


def _median_s(function: Callable[[], Any]) -> float:
    function()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))
