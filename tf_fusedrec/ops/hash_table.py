"""Step 5 of 7 (docs/concepts.md) and the update: the embedding table as a TensorFlow resource.

A handle is a scalar tensor of dtype resource. All functions have side effects; inside a tf.function TensorFlow runs the
calls on one table in program order. table_contents.py counts, reads and writes the contents of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class TableRows(NamedTuple):
    """Result of a training lookup."""

    rows: tf.Tensor  # <T>[P, D], row of each id in the order received; P >= V, zeros behind V
    handles: tf.Tensor  # <int64>[W], distinct rows; -1 for an id that admission refuses
    inverse: tf.Tensor  # <int32>[V], handles[inverse[v]] is the row of the v-th received id


class RowsAhead(NamedTuple):
    """Result of a look-ahead."""

    rows: tf.Tensor  # <T>[P, D], row of each id that has one, in the order received
    handles: tf.Tensor  # <int64>[V], row of each received id; -1 where it has none
    mark: tf.Tensor  # <int64>[3], state of the table at the look-ahead, and a fingerprint of the message

    @classmethod
    def none(cls, dim: int, dtype: tf.DType) -> RowsAhead:
        """The result where nothing was read. table_peek and a table with all rows on a device take it."""
        return cls(tf.zeros([0, dim], dtype), tf.zeros([0], tf.int64), tf.zeros([3], tf.int64))


def hash_table(
    *, shared_name: str, dim: int, seeds: Sequence[int], rule: str, hyperparameters: Sequence[float], **options: Any
) -> tf.Tensor:
    """Makes a dynamic table of S segments (MTGRBoost, section 4.1), or returns the one that has this shared_name.

    The table lies where TensorFlow places this call: on a GPU under tf.device("/GPU:0"), in host memory under "/CPU:0".
    All ops on the handle run there.

    Args:
      shared_name: Name of the resource. It lives until tf.raw_ops.DestroyResourceOp, unless it is anonymous.
      dim: D, columns of a row.
      seeds: One int64 per segment. The initial row is a pure function of (seed, id).
      rule, hyperparameters: Update rule and its numbers, as the records of tf_fusedrec/optimizers/ give them.
      **options: Further attributes of the op Fusedrec>HashTable; custom_ops/hash_table/hash_table_op.cc documents them.

    Returns:
      <resource>[].

    Raises:
      InvalidArgumentError: The rule is unknown, the folder cannot be written, or options exclude each other.
      TypeError: The op has no attribute of that name.
      UnimplementedError: A GPU table has an option that only tables in host memory support: memory_budget or
        hot_rows without host_rows; averaged with hot_after; averaged, admission_count, hot_after or a window above 1
        with host_rows.
    """
    return library.fusedrec_hash_table(
        shared_name=shared_name, dim=dim, seeds=list(seeds), rule=rule, hyperparameters=list(hyperparameters), **options
    )


def table_lookup(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> TableRows:
    """Deferred-hash lookup, training form (FusedRec, section 3, "Lossless Lookup"): finds or inserts, and touches.

    A call is one tick of the table's clock and counts an id once. The micro-batches of a step are sources of one
    message.

    Args:
      table: <resource>[].
      message: <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see rank_partition.
      received_splits: <int32>[R], entries of each block, header included.
      dim: D of the table.
      dtype: float32, float16 or bfloat16, dtype of the returned rows.

    Returns:
      TableRows.

    Raises:
      InvalidArgumentError: A header does not agree with its block. The message names the source rank.
      ResourceExhaustedError: There is no memory for new rows, max_rows is smaller than a batch, or the clock is at
        2^31 - 1. The table is what it was: clock, counts and rows, but for rows whose time to live is over.
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

    Args and errors as for table_lookup.
    """
    return RowsAhead(
        *library.fusedrec_table_look_ahead(
            table=table, message=message, received_splits=received_splits, T=dtype, dim=dim
        )
    )  # fmt: skip


def table_refresh(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, rows_ahead: RowsAhead, *, dim: int
) -> TableRows:
    """Looks up as table_lookup does, but searches and copies only rows that are new or changed since a look-ahead.

    Args:
      table: <resource>[].
      message, received_splits: Inputs of the look-ahead.
      rows_ahead: Result of table_look_ahead. Its rows must not be used afterwards.
      dim: D of the table.

    Returns:
      TableRows, equal to the result of table_lookup. The table changes as under table_lookup.

    Raises:
      InvalidArgumentError: The look-ahead had another message, or another table. Other errors as for table_lookup.
    """
    return TableRows(
        *library.fusedrec_table_refresh(
            table=table, message=message, received_splits=received_splits, rows_ahead=rows_ahead.rows,
            handles_ahead=rows_ahead.handles, mark=rows_ahead.mark, dim=dim,
        )
    )  # fmt: skip


def table_find(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> tf.Tensor:
    """Deferred-hash lookup, inference form: inserts and touches nothing. `unknown` decides on ids without a row.

    Args and errors as for table_lookup.

    Returns:
      <dtype>[P, D], row of each id in the order received; P >= V, zeros behind V.
    """
    return library.fusedrec_table_find(table=table, message=message, received_splits=received_splits, T=dtype, dim=dim)


def table_peek(
    table: tf.Tensor,
    message: tf.Tensor,
    received_splits: tf.Tensor,
    rows_ahead: RowsAhead | None = None,
    *,
    dim: int,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Reads the rows that the next table_lookup of this message would answer. Changes nothing in the table.

    An id without a row, or whose row expires at that lookup, has its initial row.

    Args:
      table, message, received_splits, dim, dtype: As in table_lookup.
      rows_ahead: Result of table_look_ahead of this message: only rows that changed since are read. None: all are.

    Returns:
      <dtype>[P, D], row of each id in the order received; P >= V, zeros behind V.

    Raises:
      InvalidArgumentError: A header does not agree with its block, or the look-ahead had another message.
    """
    if rows_ahead is None:
        rows_ahead = RowsAhead.none(dim, dtype)
    return library.fusedrec_table_peek(
        table=table, message=message, received_splits=received_splits, rows_ahead=rows_ahead.rows,
        handles_ahead=rows_ahead.handles, mark=rows_ahead.mark, dim=dim,
    )  # fmt: skip


def table_touch(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Changes the table as table_lookup does, and reads no rows.

    Args and errors as for table_lookup.

    Returns:
      handles <int64>[W] and inverse <int32>[V] of TableRows.
    """
    return library.fusedrec_table_touch(table=table, message=message, received_splits=received_splits)


def table_prefetch(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tf.Operation | None:
    """Asks the disk for the rows of a coming lookup that lie beyond the memory budget; does not wait for them.

    Args as for table_lookup.
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

    A row whose sum holds a number that is not finite stays as it is, and so do its slots. A row that `found.inverse`
    does not name has no gradient. It stays as it is, too.

    Args:
      table: <resource>[].
      found: Result of table_lookup.
      grads: <T>[>= V, D] in the order received; rows behind V are ignored.
      scale: <float32>[] factor of all gradients.
      learning_rate: <float32>[].
      step: <int64>[] number of this update, 1 for the first.

    Returns:
      <int32>[k], ascending places in `found.handles` of the rows that stay as they are. On a GPU, a row whose gradients
      are finite and whose sum is not also stays as it is, but has no place here.

    Raises:
      InvalidArgumentError: Shapes disagree, or handles are not of one lookup of this table, each once.
      FailedPreconditionError: A later lookup evicted or moved rows of that lookup, or an import came. Nothing is
        updated.
    """
    return library.fusedrec_table_apply_gradients(
        table=table, handles=found.handles, inverse=found.inverse, grads=grads, scale=scale,
        learning_rate=learning_rate, step=step,
    )  # fmt: skip


def table_accumulate_gradients(
    table: tf.Tensor, found: TableRows, grads: tf.Tensor, *, scale: float | tf.Tensor, begin: bool = False
) -> tf.Tensor:
    """Adds gradients to the sums by row, which table_apply_accumulated applies (MTGRBoost, section 5.2).

    Args:
      table, found, grads, scale: As in table_apply_gradients.
      begin: True to drop earlier sums, which a training step that failed may have left.

    Returns:
      <int32>[k], ascending places in `found.handles` of the rows whose sum is no longer finite, each once in an update.
      table_apply_accumulated leaves these rows as they are. On a GPU, only rows with such gradients are listed.
    """
    return library.fusedrec_table_accumulate_gradients(
        table=table, handles=found.handles, inverse=found.inverse, grads=grads, scale=scale, begin=begin
    )


def table_apply_accumulated(table: tf.Tensor, *, learning_rate: tf.Tensor, step: tf.Tensor) -> tf.Operation | None:
    """Applies the optimizer to the rows with accumulated sums, and clears the sums."""
    return library.fusedrec_table_apply_accumulated(table=table, learning_rate=learning_rate, step=step)
