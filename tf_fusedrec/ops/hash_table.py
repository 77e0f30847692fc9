"""Stages 5 and 6 of 8, and the update: the dynamic embedding table as a TensorFlow resource.

A handle is a scalar tensor of dtype resource. Everything here has side effects; inside a tf.function TensorFlow runs
calls on one table in program order. What a table holds is counted, read and moved by table_contents.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class TableRows(NamedTuple):
    """Answer of a training lookup."""

    rows: tf.Tensor  # <T>[P, D], row of each id in the order received; P >= V, zeros behind V
    handles: tf.Tensor  # <int64>[W], distinct rows; -1 for an id that admission refuses
    inverse: tf.Tensor  # <int32>[V], handles[inverse[v]] is the row of the v-th received id


class RowsAhead(NamedTuple):
    """What a look-ahead has seen."""

    rows: tf.Tensor  # <T>[P, D], row of each id that has one, in the order received
    handles: tf.Tensor  # <int64>[V], row of each received id; -1 where it has none
    mark: tf.Tensor  # <int64>[2], state of the table then


def hash_table(
    *,
    shared_name: str,
    dim: int,
    seeds: Sequence[int],
    rule: str,
    hyperparameters: Sequence[float],
    segment_names: Sequence[str] = (),
    storage: str = "float32",
    stochastic_rounding: bool = False,
    distribution: str = "constant",
    a: float = 0.0,
    b: float = 0.0,
    max_rows: int = 0,
    eviction: str = "none",
    ttl: int = 0,
    admission_count: int = 1,
    max_candidates: int = 0,
    record_tombstones: bool = False,
    hot_after: int = 0,
    memory_budget: int = 0,
    tier_folder: str = "",
    window: int = 1,
    averaged: bool = False,
    host_rows: bool = False,
) -> tf.Tensor:
    """Makes a dynamic table of S segments (MTGRBoost, section 4.1), or gives the one that has this shared_name.

    It is where TensorFlow places this call: on a GPU under tf.device("/GPU:0"), in host memory under "/CPU:0". All that
    is done with the handle follows it there.

    Args:
      shared_name: of the resource; it lives until tf.raw_ops.DestroyResourceOp.
      dim: D, columns of a row.
      seeds: one int64 per segment; the initial row is a pure function of (seed, id).
      rule, hyperparameters: of the update, as the records of tf_fusedrec/optimizers/ give them.
      segment_names: for messages; one per segment, or none.
      storage: "float32", "bfloat16" or "float16".
      stochastic_rounding: of 16-bit storage.
      distribution, a, b: of initial rows, see initial_rows.
      max_rows: per segment; 0 for no limit.
      eviction: "none", "lru" or "lfu": which rows leave when max_rows is reached.
      ttl: training lookups after which an untouched row leaves; 0 for never.
      admission_count: training lookups that must bring an id before it gets a row.
      max_candidates: ids counted for admission, per segment; 0 for no limit.
      record_tombstones: remember ids that left.
      hot_after: when above 0, rows begin in float16 and move to float32 at that many training lookups.
      memory_budget: bytes of rows in memory; rows beyond are kept in a file in tier_folder. 0 for no limit.
      tier_folder: of that file.
      window: training lookups whose rows are neither evicted nor moved.
      averaged: replicas train apart: remember what they must tell each other (table_replicas.py).
      host_rows: on a GPU, rows in host memory and those of two batches on the device, for tables larger than that
        (NestPipe, section IV-B); table_look_ahead then copies rows of the next batch. In host memory it says nothing.

    Returns:
      <resource>[].

    Raises:
      InvalidArgumentError: an unknown rule, a folder that cannot be written, options that exclude each other.
      UnimplementedError: on a GPU, an option that only tables in host memory have: admission_count, hot_after and
        averaged; without host_rows record_tombstones and memory_budget; with host_rows a window above 1.
    """
    return library.fusedrec_hash_table(
        shared_name=shared_name, dim=dim, seeds=list(seeds), rule=rule, hyperparameters=list(hyperparameters),
        segment_names=list(segment_names), storage=storage, stochastic_rounding=stochastic_rounding,
        distribution=distribution, a=a, b=b, max_rows=max_rows, eviction=eviction, ttl=ttl,
        admission_count=admission_count, max_candidates=max_candidates, record_tombstones=record_tombstones,
        hot_after=hot_after, memory_budget=memory_budget, tier_folder=tier_folder, window=window,
        averaged=averaged, host_rows=host_rows,
    )  # fmt: skip


def table_lookup(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> TableRows:
    """Deferred-hash lookup, training form (FusedRec, section 3, "Lossless Lookup"): finds or inserts, and touches.

    A call is one tick of the table's clock and counts an id once. Micro-batches of a step are sources of one message.

    Args:
      table: <resource>[].
      message: <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see rank_partition.
      received_splits: <int32>[R], entries of each block, header included.
      dim: D of the table.
      dtype: of the answer: float32, float16 or bfloat16.

    Returns:
      TableRows.

    Raises:
      InvalidArgumentError: a header does not agree with its block; the message names the source rank.
      ResourceExhaustedError: no memory for new rows, or max_rows is smaller than a batch. The table stays readable.
    """
    return TableRows(
        *library.fusedrec_table_lookup(
            table=table, message=message, received_splits=received_splits, T=dtype, dim=dim
        )
    )  # fmt: skip


def table_look_ahead(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> RowsAhead:
    """Reads the rows that a coming table_refresh will want (NestPipe, section IV). Changes nothing in the table.

    Args and errors are those of table_lookup.
    """
    return RowsAhead(
        *library.fusedrec_table_look_ahead(
            table=table, message=message, received_splits=received_splits, T=dtype, dim=dim
        )
    )  # fmt: skip


def table_refresh(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, ahead: RowsAhead, *, dim: int
) -> TableRows:
    """table_lookup that begins from a look-ahead: searches and copies only what is new or has changed since.

    Args:
      table: <resource>[].
      message, received_splits: those of the look-ahead.
      ahead: of table_look_ahead; its rows must not be used any more.
      dim: D of the table.

    Returns:
      What table_lookup would answer now, and the table as that would leave it.

    Raises:
      As table_lookup; InvalidArgumentError: a look-ahead of another message.
    """
    return TableRows(
        *library.fusedrec_table_refresh(
            table=table, message=message, received_splits=received_splits, rows_ahead=ahead.rows,
            handles_ahead=ahead.handles, mark=ahead.mark, dim=dim,
        )
    )  # fmt: skip


def table_find(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Deferred-hash lookup, inference form: never inserts or touches; unknown ids have their initial row.

    Args and errors are those of table_lookup.

    Returns:
      <dtype>[P, D], row of each id in the order received; P >= V, zeros behind V.
    """
    return library.fusedrec_table_find(table=table, message=message, received_splits=received_splits, T=dtype, dim=dim)


def table_prefetch(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tf.Operation | None:
    """Asks the disk for rows beyond the memory budget that a coming lookup will want; does not wait for them.

    Args are those of table_lookup.
    """
    return library.fusedrec_table_prefetch(table=table, message=message, received_splits=received_splits)


def table_apply_gradients(
    table: tf.Tensor,
    found: TableRows,
    grads: tf.Tensor,
    *,
    scale: float | tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
) -> tf.Tensor:
    """Sums gradients of equal rows over their sources, in the order received, and applies the optimizer in place.

    A row whose sum holds a number that is not finite stays as it is, and so do its slots.

    Args:
      table: <resource>[].
      found: of table_lookup.
      grads: <T>[>= V, D] in the order received; rows behind V are ignored.
      scale: <float32>[] factor of all gradients.
      learning_rate: <float32>[].
      step: <int64>[] number of this update, 1 for the first.

    Returns:
      <int32>[k], ascending: places in `found.handles` of the rows that stay as they are. On a GPU, rows whose gradients
      are finite and whose sum is not stay as they are without a place here.

    Raises:
      InvalidArgumentError: shapes disagree, or handles are not of one lookup of this table.
      FailedPreconditionError: rows of that lookup have been evicted or moved by a later one; nothing is updated.
    """
    return library.fusedrec_table_apply_gradients(
        table=table, handles=found.handles, inverse=found.inverse, grads=grads, scale=scale,
        learning_rate=learning_rate, step=step,
    )  # fmt: skip


def table_accumulate_gradients(
    table: tf.Tensor, found: TableRows, grads: tf.Tensor, *, scale: float | tf.Tensor
) -> tf.Tensor:
    """Adds gradients to the sums, by row, that wait for table_apply_accumulated (MTGRBoost, section 5.2).

    Args are those of table_apply_gradients.

    Returns:
      <int32>[k], ascending: places in `found.handles` of the rows whose sum is no longer finite, each once in an
      update: table_apply_accumulated leaves them as they are.
    """
    return library.fusedrec_table_accumulate_gradients(
        table=table, handles=found.handles, inverse=found.inverse, grads=grads, scale=scale
    )


def table_apply_accumulated(table: tf.Tensor, *, learning_rate: tf.Tensor, step: tf.Tensor) -> tf.Operation | None:
    """Applies the optimizer to the rows that have waiting sums, and clears those."""
    return library.fusedrec_table_apply_accumulated(table=table, learning_rate=learning_rate, step=step)
