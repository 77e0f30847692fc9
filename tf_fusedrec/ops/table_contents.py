"""Ops on the contents of a table: statistics, keys, records for checkpoints, removal, eviction.

Side effects and order as in hash_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class TableStatistics(NamedTuple):
    """Counts since the table was made or cleared."""

    segments: tf.Tensor  # <int64>[S, 6]: keys, hits, inserts, evictions, refused, candidates
    bytes: tf.Tensor  # <int64>[5]: bytes of keys, of rows in memory, in the second pool; rows in each of the pools
    traffic: tf.Tensor  # <int64>[S, 3], with host_rows on a GPU: hits of hot rows, bytes of rows to the device and back


def table_statistics(table: tf.Tensor) -> TableStatistics:
    """Returns statistics by category. A hit is a distinct row that a training lookup found."""
    return TableStatistics(*library.fusedrec_table_statistics(table=table))


def table_size(table: tf.Tensor) -> tf.Tensor:
    """Returns <int64>[S], the number of rows of each segment."""
    return library.fusedrec_table_size(table=table)


def table_keys(
    table: tf.Tensor, segment: int, *, since: Sequence[int] | tf.Tensor = (0, 0)
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids <int64>[n] of a segment, in no meaningful order, and handles <int64>[n] for table_read_records.

    Args:
      table: <resource>[].
      segment: s.
      since: <int64>[2], an answer of table_clock. Only rows that an update changed, or a training lookup touched, after
        it are listed. (0, 0) lists all.
    """
    return library.fusedrec_table_keys(
        table=table, segment=tf.constant(segment, tf.int64), since=tf.constant(since, tf.int64)
    )


def table_read_records(table: tf.Tensor, handles: tf.Tensor) -> tf.Tensor:
    """Returns <uint8>[n, bytes], packed rows with slots and metadata: custom_ops/hash_table/cpu/parts/row_records.h."""
    return library.fusedrec_table_read_records(table=table, handles=handles)


def table_import(table: tf.Tensor, segment: int, ids: tf.Tensor, records: tf.Tensor) -> None:
    """Inserts or overwrites rows of distinct ids <int64>[n] with records <uint8>[n, bytes] of table_read_records."""
    library.fusedrec_table_import(table=table, segment=tf.constant(segment, tf.int64), ids=ids, records=records)


def table_remove(table: tf.Tensor, segment: int, ids: tf.Tensor) -> tf.Tensor:
    """Removes rows by id <int64>[n]; returns <int64>[], how many had a row."""
    return library.fusedrec_table_remove(table=table, segment=tf.constant(segment, tf.int64), ids=ids)


def table_evict(table: tf.Tensor, segment: int, count: int) -> tf.Tensor:
    """Evicts the `count` rows that the policy ranks lowest; returns <int64>[], how many could go."""
    return library.fusedrec_table_evict(
        table=table, segment=tf.constant(segment, tf.int64), count=tf.constant(count, tf.int64)
    )


def table_tombstones(table: tf.Tensor, segment: int) -> tf.Tensor:
    """Returns <int64>[n], ascending ids that left since table_forget_tombstones and have not come back."""
    return library.fusedrec_table_tombstones(table=table, segment=tf.constant(segment, tf.int64))


def table_forget_tombstones(table: tf.Tensor) -> None:
    """Begins a new record of tombstones."""
    library.fusedrec_table_forget_tombstones(table=table)


def table_candidates(table: tf.Tensor, segment: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids <int64>[n] that wait for admission, in hash order, and their counts <int64>[n]."""
    return library.fusedrec_table_candidates(table=table, segment=tf.constant(segment, tf.int64))


def table_import_candidates(table: tf.Tensor, segment: int, ids: tf.Tensor, counts: tf.Tensor) -> None:
    """Sets the counts of ids that wait for admission; both <int64>[n]."""
    library.fusedrec_table_import_candidates(
        table=table, segment=tf.constant(segment, tf.int64), ids=ids, counts=counts
    )


def table_clock(table: tf.Tensor) -> tf.Tensor:
    """Returns <int64>[2]: number of training lookups, version (number of changes)."""
    return library.fusedrec_table_clock(table=table)


def table_set_clock(table: tf.Tensor, clock: tf.Tensor) -> None:
    """Sets the numbers that table_clock returns."""
    library.fusedrec_table_set_clock(table=table, clock=clock)


def table_clear(table: tf.Tensor) -> None:
    """Removes all rows, candidates, tombstones, statistics and waiting gradients."""
    library.fusedrec_table_clear(table=table)


for _op in (
    "HashTable", "TableLookup", "TableLookAhead", "TableRefresh", "TableFind", "TablePeek", "TableTouch",
    "TableStatistics", "TableSize", "TableKeys", "TableReadRecords", "TableRemove", "TableEvict", "TableTombstones",
    "TableCandidates", "TableClock", "TableApplyGradients", "TableAccumulateGradients",
):  # fmt: skip
    tf.no_gradient(f"Fusedrec>{_op}")


def table_destroy(table: tf.Tensor) -> None:
    """Frees the table at once. Python's garbage collector may ask for it while a function is traced.

    Args:
      table: Handle of hash_table. A table that is already freed is no error.
    """
    with tf.__internal__.eager_context.eager_mode():  # an operation of the traced function would run later
        tf.raw_ops.DestroyResourceOp(resource=table, ignore_lookup_error=True)
