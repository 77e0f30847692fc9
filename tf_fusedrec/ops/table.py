"""The embedding table as a TensorFlow resource: lookups, updates, contents, replicas; and initial rows for TFRA.

A handle is a scalar tensor of dtype resource. All functions on a handle have side effects; inside a tf.function
TensorFlow runs the calls on one table in program order. custom_ops/hash_table/*_op.cc document each op.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import _functions, library
from tf_fusedrec.ops.ids import RowSums


class TableRows(NamedTuple):
    """Result of a training lookup."""

    rows: tf.Tensor  # <T>[P, D], row of each id in the order received; P >= V, zeros after row V
    handles: tf.Tensor  # <int64>[W], distinct rows; -1 for an id that admission refuses
    inverse: tf.Tensor  # <int32>[V], handles[inverse[v]] is the row of the v-th received id


class RowsAhead(NamedTuple):
    """Result of a look-ahead. Only one lookup may use its rows."""

    rows: tf.Tensor  # <T>[P, D], row of each id that has one, in the order received
    handles: tf.Tensor  # <int64>[V], row of each received id; -1 where it has none
    mark: tf.Tensor  # <int64>[3], state of the table at the look-ahead, and a fingerprint of the message

    @classmethod
    def none(cls, dim: int, dtype: tf.DType) -> RowsAhead:
        """The result of a table with all rows on a device, which reads nothing ahead. No other table accepts it."""
        return cls(tf.zeros([0, dim], dtype), tf.zeros([0], tf.int64), tf.zeros([3], tf.int64))


class TableStatistics(NamedTuple):
    """Counts since the table was made or cleared. A hit is a distinct row that a training lookup found."""

    segments: tf.Tensor  # <int64>[S, 6]: keys, hits, inserts, evictions, refused, candidates
    bytes: tf.Tensor  # <int64>[5]: bytes of keys, of rows in memory, in the second pool; rows in each of the pools
    traffic: tf.Tensor  # <int64>[S, 3], with host_rows on a GPU: hits of hot rows, bytes of rows to the device and back


class Unsynced(NamedTuple):
    """Ids that one replica trained or removed since table_take_unsynced was last called."""

    # <int64>[2 * S + n]: counts[2 * S], then by segment the trained ids with a row, then by segment the removed ids.
    # Ascending inside a segment; on a GPU, trained ids are in the order of rows. unpack_message reads it as a message
    # of one source and 2 * S segments.
    message: tf.Tensor
    headers: tf.Tensor  # <int64>[n], last << 32 | count of trained rows, 0 for removed ids


def hash_table(
    *,
    shared_name: str,
    tables: Sequence[Mapping[str, Any]],
    anonymous: bool = False,
) -> tf.Tensor:
    """Makes a dynamic table of S segments (MTGRBoost, section 4.1), or returns the one that has this shared_name.

    The table and all ops on its handle run where TensorFlow places this call: under tf.device("/GPU:0") or "/CPU:0".

    Args:
      shared_name: Name of the resource. It lives until table_destroy, unless it is anonymous.
      tables: Options of each segment by path, see table_schema; others have their default. The initial row is a pure
        function of (seed, id).
      anonymous: True if the table goes with its handle, and no name finds it.

    Returns:
      <resource>[].

    Raises:
      InvalidArgumentError: The rule is unknown, the folder cannot be written, or check_tables refuses the options.
    """
    texts = list(map(_text, tables))
    # TensorFlow compares only the ends of long texts in a list, and uses the kernel of an earlier eager call again
    # if all attributes look equal. It compares whole names, and no name finds an anonymous table.
    name = "".join(texts) if anonymous else shared_name
    return library.fusedrec_hash_table(shared_name=name, anonymous=anonymous, tables=texts)


def _text(table: Mapping[str, Any]) -> str:
    return json.dumps(table, ensure_ascii=False, default=float)  # takes NumPy's numbers, too


@functools.cache
def table_schema() -> dict[str, dict[str, Any]]:
    """The options of a table by path, from custom_ops/hash_table/options.h.

    Each has a scope ("table", "group": equal in a group, "sum": the group has the sum), a default, for texts choices,
    for integers the least and most, and the places that lack it: "device", "host_rows", "averaged". "rule" has the
    parameters of each rule; their paths begin with "rule.".
    """
    return json.loads(_functions.fusedrec_table_schema())


def check_tables(tables: Sequence[Mapping[str, Any]], place: str = "CPU") -> str:
    """Why these tables cannot be a group on a "CPU" or "device"; "" where they can. Arguments as for hash_table."""
    texts = [_text(table).encode() for table in tables]
    return _functions.fusedrec_check_table((ctypes.c_char_p * len(texts))(*texts), len(texts), place.encode()).decode()


def table_destroy(table: tf.Tensor) -> None:
    """Frees the table at once, also while a function is traced. A table that is already freed is no error."""
    with tf.__internal__.eager_context.eager_mode():  # an operation of the traced function would run later
        tf.raw_ops.DestroyResourceOp(resource=table, ignore_lookup_error=True)


def table_lookup(
    table: tf.Tensor,
    message: tf.Tensor,
    received_splits: tf.Tensor,
    ahead: RowsAhead | None = None,
    *,
    sums: RowSums | None = None,
    with_rows: bool = True,
    window: int = 1,
    dim: int,
    dtype: tf.DType = tf.float32,
) -> TableRows:
    """Deferred-hash lookup for training (FusedRec, section 3, "Lossless Lookup"): finds or inserts, and touches.

    A call is one tick of the table's clock and counts an id once. The micro-batches of a step are sources of one
    message.

    Args:
      table: <resource>[].
      message: <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see rank_partition.
      received_splits: <int32>[R], entries of each block, header included.
      ahead: table_look_ahead of this message. Only rows that are new or changed since then are searched and copied.
      sums: To return in place of rows, where there are any: TableRows.rows is <dtype>[M, D]. On a CPU, without `ahead`.
      with_rows: False reads no rows: TableRows.rows is <dtype>[0, D]. It excludes `ahead`.
      window: Number of lookups, this one included, whose gradients are to come. Their rows neither leave nor move.
      dim: D of the table.
      dtype: float32, float16 or bfloat16, dtype of the returned rows; with `ahead`, they have the dtype of its rows.

    Raises:
      InvalidArgumentError: A header disagrees with its block (the message names the source rank), or the look-ahead had
        a different message or table.
      ResourceExhaustedError: There is no memory for new rows, max_rows_per_rank is smaller than a batch, or the clock
        is at 2^31 - 1. Clock, counts and rows stay, except for expired rows.
    """
    return TableRows(
        *library.fusedrec_table_lookup(
            table=table, message=message, received_splits=received_splits, dim=dim, read_rows=with_rows, window=window,
            **_ahead(ahead if with_rows else None, dtype), **_sums(sums),
        )
    )  # fmt: skip


def table_read(
    table: tf.Tensor,
    message: tf.Tensor,
    received_splits: tf.Tensor,
    ahead: RowsAhead | None = None,
    *,
    window: int = 0,
    dim: int,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Reads rows <dtype>[P, D] in the order received, P >= V, zeros after row V. Changes nothing in the table.

    Args and errors as for table_lookup.
      window: 0: the option `unknown` gives the row of an id without one. Above: the rows are those that the next
        table_lookup of this message and window would return; an id without a row, or with an expired one, has its
        initial row.
      ahead: With a window only.
    """
    return library.fusedrec_table_read(
        table=table, message=message, received_splits=received_splits, dim=dim, window=window,
        **_ahead(ahead if window else None, dtype),
    )  # fmt: skip


def table_look_ahead(
    table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor, *, dim: int, dtype: tf.DType = tf.float32
) -> RowsAhead:
    """Reads the rows for a coming lookup (NestPipe, section IV). Changes nothing in the table. Args as table_lookup."""
    return RowsAhead(
        *library.fusedrec_table_look_ahead(
            table=table, message=message, received_splits=received_splits, T=dtype, dim=dim
        )
    )  # fmt: skip


def table_prefetch(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tf.Operation | None:
    """Asks the disk for the rows of a coming lookup that exceed the memory budget; does not wait for them."""
    return library.fusedrec_table_prefetch(table=table, message=message, received_splits=received_splits)


def _ahead(ahead: RowsAhead | None, dtype: tf.DType) -> dict[str, Any]:
    if ahead is None:
        return {"rows_ahead": [], "handles_ahead": [], "mark": [], "T": dtype}
    rows = tf.convert_to_tensor(ahead.rows)
    return {"rows_ahead": [rows], "handles_ahead": [ahead.handles], "mark": [ahead.mark], "T": rows.dtype}


def _sums(sums: RowSums | None) -> dict[str, Any]:
    return (
        {"sum_index": [], "sum_splits": []}
        if sums is None
        else {"sum_index": [sums.index], "sum_splits": [sums.splits]}
    )


def table_apply_gradients(
    table: tf.Tensor,
    rows: TableRows,
    grads: tf.Tensor,
    sums: RowSums | None = None,
    *,
    scale: float | tf.Tensor,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
    coming: Sequence[tf.Tensor] = (),
    begin: bool = True,
) -> tf.Tensor:
    """Sums gradients of equal rows over their sources, in the order received, and applies the optimizer in place.

    A row whose sum is not finite stays as it is, and so do its slots. A row that `rows.inverse` does not name also
    stays.

    Args:
      table: <resource>[].
      rows: Result of table_lookup.
      grads: <T>[>= V, D] in the order received; rows after V are ignored. With sums, [M, D].
      sums: What grads are of, where it has any. A row gets the gradients of all sums that it is a term of, in their
        order.
      scale: <float32>[] factor of all gradients.
      learning_rate: <float32>[].
      step: <int64>[] number of this update, 1 for the first.
      coming: <int32>[any] each, the inverses of later gradients of this update, all of rows.handles. Sums of rows that
        they name wait for them; other rows are trained now. On a CPU.
      begin: False for these later gradients.

    Returns:
      <int32>[k], ascending places in `rows.handles` of the rows that are not finite. On a GPU, a row with finite
      gradients and an infinite sum is not listed.

    Raises:
      InvalidArgumentError: Shapes disagree, or handles are not of one lookup of this table, each once.
      FailedPreconditionError: A later lookup evicted or moved rows, or rows were imported. Nothing is updated.
    """
    return library.fusedrec_table_apply_gradients(
        table=table, handles=rows.handles, inverse=rows.inverse, grads=grads, scale=scale,
        learning_rate=learning_rate, step=step, begin=begin, coming=list(coming), **_sums(sums),
    )  # fmt: skip


def table_accumulate_gradients(
    table: tf.Tensor,
    rows: TableRows,
    grads: tf.Tensor,
    sums: RowSums | None = None,
    *,
    scale: float | tf.Tensor,
    begin: bool = False,
) -> tf.Tensor:
    """Adds gradients to the sums by row, which table_apply_accumulated applies (MTGRBoost, section 5.2).

    Args and result as for table_apply_gradients; a row is listed once per update.
      begin: True to drop earlier sums, which a training step that failed may have left.
    """
    return library.fusedrec_table_accumulate_gradients(
        table=table, handles=rows.handles, inverse=rows.inverse, grads=grads, scale=scale, begin=begin, **_sums(sums)
    )


def table_apply_accumulated(table: tf.Tensor, *, learning_rate: tf.Tensor, step: tf.Tensor) -> tf.Operation | None:
    """Applies the optimizer to the rows with accumulated sums, and clears the sums."""
    return library.fusedrec_table_apply_accumulated(table=table, learning_rate=learning_rate, step=step)


def table_statistics(table: tf.Tensor) -> TableStatistics:
    return TableStatistics(*library.fusedrec_table_statistics(table=table))


def table_keys(
    table: tf.Tensor, segment: int, *, since: Sequence[int] | tf.Tensor = (0, 0)
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids <int64>[n] of a segment, in any order, and handles <int64>[n] for table_read_records.

    since: <int64>[2], a result of table_clock. Only rows that were updated or touched after it are listed.
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
    """Evicts the `count` rows that the policy ranks lowest; returns <int64>[], the number of evicted rows."""
    return library.fusedrec_table_evict(
        table=table, segment=tf.constant(segment, tf.int64), count=tf.constant(count, tf.int64)
    )


def table_tombstones(table: tf.Tensor, segment: int) -> tf.Tensor:
    """Returns <int64>[n], ascending ids without a row that were removed since table_forget_tombstones."""
    return library.fusedrec_table_tombstones(table=table, segment=tf.constant(segment, tf.int64))


def table_forget_tombstones(table: tf.Tensor) -> None:
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


# Ops of one replica of a table. Replicas train apart and are averaged from time to time, by the rules of
# custom_ops/hash_table/cpu/parts/replicas.h. FailedPreconditionError: the table was not made with `averaged`.


def table_note_trained(table: tf.Tensor, message: tf.Tensor, received_splits: tf.Tensor) -> tf.Operation | None:
    """Records that rows of the ids of a lookup (arguments of table_lookup) have been trained."""
    return library.fusedrec_table_note_trained(table=table, message=message, received_splits=received_splits)


def table_take_unsynced(table: tf.Tensor) -> Unsynced:
    """Returns the ids recorded since the last call, and forgets them."""
    return Unsynced(*library.fusedrec_table_take_unsynced(table=table))


def table_read_numbers(table: tf.Tensor, ids: tf.Tensor, segment_splits: tf.Tensor) -> tf.Tensor:
    """Reads rows with optimizer slots. An id without a row has its initial row and slots. Touches nothing.

    Args:
      table: <resource>[].
      ids: <int64>[n], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      <float32>[P, k]: row, element-wise slots, row-wise slots; P is n rounded up to a bucketed size, zeros after row n.
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
    """Gives a replica the common state: removes ids, sets rows, and keeps to max_rows_per_rank.

    Args:
      table: <resource>[].
      left: <int64>[m], removed ids, grouped by segment. Rows that a training lookup pins stay.
      left_splits: <int64>[S+1].
      ids: <int64>[n], distinct, grouped by segment. Present rows stay where they are, others are made.
      segment_splits: <int64>[S+1].
      numbers: <float32>[>= n, k] of table_read_numbers.
      headers: <int64>[n], last << 32 | count. A row keeps its counters where they are larger.
      step: <int64>[], seeds the stochastic rounding of 16-bit rows; the same at all replicas.

    Raises:
      InvalidArgumentError: Shapes disagree.
      ResourceExhaustedError: No memory for new rows, or more pinned rows than max_rows_per_rank.
    """
    return library.fusedrec_table_merge(
        table=table, left=left, left_splits=left_splits, ids=ids, segment_splits=segment_splits, numbers=numbers,
        headers=headers, step=step,
    )  # fmt: skip


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
    """Replaces the rows that do not exist by their initial value, a pure function of (seed, id). For tables of TFRA.

    Numbers come from Philox4x32-10 (Salmon et al., SC 2011), keyed by the table's seed and counted by id and column.
    The row is the same on every rank, at every step, after eviction and return.

    Args:
      rows: <float32, float16 or bfloat16>[W, D], anything where exists is false.
      exists: <bool>[W].
      ids: <int64>[W], grouped by segment (= table).
      segment_splits: <int64>[S+1].
      seeds: One int64 per table.
      distribution, a, b: "constant" (a), "uniform" on [a, b), "normal" (mean a, standard deviation b) or
        "truncated_normal" (the same, within two standard deviations).

    Returns:
      [W, D].
    """
    return library.fusedrec_initial_rows(
        rows=rows, exists=exists, ids=ids, segment_splits=segment_splits,
        seeds=list(seeds), distribution=distribution, a=a, b=b,
    )  # fmt: skip


for _op in (
    "HashTable", "InitialRows", "TableLookup", "TableLookAhead", "TableRead", "TableStatistics", "TableKeys",
    "TableReadRecords", "TableRemove", "TableEvict", "TableTombstones", "TableCandidates", "TableClock",
    "TableApplyGradients", "TableAccumulateGradients", "TableTakeUnsynced", "TableReadNumbers",
):  # fmt: skip
    tf.no_gradient(f"Fusedrec>{_op}")
