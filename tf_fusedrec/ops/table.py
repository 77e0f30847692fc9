"""Step 5 of 7 (docs/concepts.md) and the update: the embedding table as a TensorFlow resource.

A handle is a scalar tensor of dtype resource. All functions have side effects; inside a tf.function TensorFlow runs the
calls on one table in program order."""

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


def initial_rows(
    rows: tf.Tensor,
    exists: tf.Tensor,
    ids: tf.Tensor,
    segment_splits: tf.Tensor,
    *,
    seeds: Sequence[int],
    distribution: str,
    a: float,
    b: float = 0.0,
) -> tf.Tensor:
    """Replaces the rows that do not exist by their initial value.

    Numbers come from Philox4x32-10 (Salmon et al., SC 2011), keyed by the table's seed and counted by id and column.
    The row is the same on every rank, at every step, after eviction and return.

    Args:
      rows: <float32, float16 or bfloat16>[W, D], anything where exists is false.
      exists: <bool>[W].
      ids: <int64>[W], grouped by segment (= table).
      segment_splits: <int64>[S+1].
      seeds: one int64 per table.
      distribution: "constant" (a), "uniform" on [a, b), "normal" (mean a, standard deviation b) or
        "truncated_normal" (the same, given that it lies inside two standard deviations).
      a, b: Parameters of the distribution.

    Returns:
      [W, D].

    Raises:
      InvalidArgumentError: Shapes disagree.
    """
    return library.fusedrec_initial_rows(
        rows=rows, exists=exists, ids=ids, segment_splits=segment_splits,
        seeds=list(seeds), distribution=distribution, a=a, b=b,
    )  # fmt: skip


tf.no_gradient("Fusedrec>InitialRows")
