"""Ops of one replica of a table whose replicas train apart and are averaged from time to time.

Side effects and order as in hash_table.py. The rules are in custom_ops/hash_table/cpu/parts/replicas.h.
"""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class Unsynced(NamedTuple):
    """Ids that one replica trained or removed since table_take_unsynced was last called."""

    # <int64>[2 * S + n]: counts[2 * S], then by segment ids that were trained and have a row, then by segment ids that
    # left and have none. Ascending inside a segment; on a GPU, trained ids are in the order of rows.
    # A message of one source and 2 * S segments, see unpack_message.
    message: tf.Tensor
    headers: tf.Tensor  # <int64>[n], last << 32 | count of rows that were trained, 0 of ids that left


def table_note_trained(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tf.Operation | None:
    """Notes that rows of the ids of a lookup (arguments of table_lookup) have been trained.

    Raises:
      FailedPreconditionError: The table was not made with `averaged`.
    """
    return library.fusedrec_table_note_trained(table=table, message=message, received_splits=received_splits)


def table_take_unsynced(table: tf.Tensor) -> Unsynced:
    """Returns the ids noted since the last call, and forgets them.

    Raises:
      FailedPreconditionError: the table was not made with `averaged`.
    """
    return Unsynced(*library.fusedrec_table_take_unsynced(table=table))


def table_read_numbers(table: tf.Tensor, ids: tf.Tensor, segment_splits: tf.Tensor) -> tf.Tensor:
    """Reads rows with optimizer slots. An id without a row has its initial row and slots. Touches nothing.

    Args:
      table: <resource>[].
      ids: <int64>[n], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      <float32>[P, k]: row, element-wise slots, row-wise slots; P is n rounded up to a bucketed size, zeros behind n.
    """
    return library.fusedrec_table_read_numbers(table=table, ids=ids, segment_splits=segment_splits)


def table_merge(
    table: tf.Tensor,
    *,
    left: tf.Tensor,
    left_splits: tf.Tensor,
    ids: tf.Tensor,
    segment_splits: tf.Tensor,
    numbers: tf.Tensor,
    headers: tf.Tensor,
    step: tf.Tensor,
) -> tf.Operation | None:
    """Brings a replica to the common state: removes ids, sets rows, and keeps to max_rows.

    Args:
      table: <resource>[].
      left: <int64>[m], grouped by segment; rows that a training lookup holds stay.
      left_splits: <int64>[S+1].
      ids: <int64>[n], distinct, grouped by segment. Present rows stay where they are, others are made.
      segment_splits: <int64>[S+1].
      numbers: <float32>[>= n, k] as of table_read_numbers.
      headers: <int64>[n], last << 32 | count. A row keeps its own counters where they are larger.
      step: <int64>[], seeds the stochastic rounding of 16-bit rows; the same at all replicas.

    Raises:
      InvalidArgumentError: shapes disagree. FailedPreconditionError: the table was not made with `averaged`.
      ResourceExhaustedError: no memory for new rows, or more rows than max_rows that may not leave.
    """
    return library.fusedrec_table_merge(
        table=table, left=left, left_splits=left_splits, ids=ids, segment_splits=segment_splits, numbers=numbers,
        headers=headers, step=step,
    )  # fmt: skip


for _op in ("TableTakeUnsynced", "TableReadNumbers"):
    tf.no_gradient(f"Fusedrec>{_op}")
