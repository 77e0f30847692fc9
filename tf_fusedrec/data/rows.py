"""Rows as NumPy columns, the form in which rows pass from the Parquet reader to the batcher and to TensorFlow.

A scalar column is one array [B]. A list column has values [T] and row_splits [B+1]. All functions work on whole arrays,
so there is no Python loop over values between file and batch.

rows_from_arrow converts Arrow record batches, without copies where rows stay whole, and checks every row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_fusedrec.data.columns import BadInput, Column

_LONG_ROW = 64  # values per row, above which a copy per row is faster than an index per value


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One list column. Row b is values[row_splits[b]:row_splits[b + 1]]."""

    values: np.ndarray  # <dtype>[T]
    row_splits: np.ndarray  # <int64>[B+1], from 0 to T, never decreasing

    def lengths(self) -> np.ndarray:
        """Number of values of each row, <int64>[B]."""
        return np.diff(self.row_splits)

    def slice(self, begin: int, end: int) -> Ragged:
        """Rows begin..end, without copying values."""
        splits = self.row_splits[begin : end + 1]
        return Ragged(self.values[splits[0] : splits[-1]], splits - splits[0])

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> Ragged:
        """The rows values[starts[i]:starts[i] + lengths[i]], in that order. starts, lengths: <int64>[B']."""
        splits = splits_of(lengths)
        if splits[-1] > _LONG_ROW * len(lengths):
            rows = [self.values[begin:end] for begin, end in zip(starts.tolist(), (starts + lengths).tolist())]
            return Ragged(_joined(rows, splits[-1]), splits)
        # Value t of the result is at starts[row of t] + (t - splits[row of t]).
        source = np.repeat(starts - splits[:-1], lengths)
        source += np.arange(splits[-1])
        return Ragged(self.values[source], splits)

    def take(self, order: np.ndarray) -> Ragged:
        """The rows `order` <int64>[B'], in that order."""
        return self.gather(self.row_splits[order], self.lengths()[order])

    def pick(self, at: np.ndarray) -> Ragged:
        """The values at the ascending places `at` <int64>[K], in the same number of rows."""
        return Ragged(self.values[at], np.searchsorted(at, self.row_splits))

    def keep_last(self, count: int) -> Ragged:
        """Each row's last `count` values; a shorter row stays whole."""
        lengths = self.lengths()
        if lengths.max(initial=0) <= count:
            return self
        kept = np.minimum(lengths, count)
        return self.gather(self.row_splits[1:] - kept, kept)


def _joined(rows: list[np.ndarray], size: int) -> np.ndarray:
    """Concatenates rows (at least one) <dtype>[..] with `size` values to an array that TensorFlow need not copy.

    Arrow aligns to 64 bytes and reuses the memory of earlier batches. np.empty would make the system clear new pages
    for arrays of this size.
    """
    dtype = rows[0].dtype
    return np.concatenate(rows, out=np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype))


Values = np.ndarray | Ragged


@dataclasses.dataclass(frozen=True)
class Rows:
    """num_rows rows: scalar columns <dtype>[B] and list columns, by name."""

    columns: Mapping[str, Values]
    num_rows: int

    def ragged(self, name: str) -> Ragged:
        """The list column `name`. The caller must know from its Column that it is a list column."""
        column = self.columns[name]
        assert isinstance(column, Ragged), f"column {name!r} is a scalar"
        return column

    def slice(self, begin: int, end: int) -> Rows:
        """Rows begin..end, without copying values."""
        columns = {
            name: column.slice(begin, end) if isinstance(column, Ragged) else column[begin:end]
            for name, column in self.columns.items()
        }
        return Rows(columns, end - begin)

    def take(self, order: np.ndarray) -> Rows:
        """The rows `order` <int64>[B'], in that order."""
        columns = {
            name: column.take(order) if isinstance(column, Ragged) else column[order]
            for name, column in self.columns.items()
        }
        return Rows(columns, len(order))


def splits_of(lengths: np.ndarray) -> np.ndarray:
    """row_splits <int64>[B+1] of rows with these lengths <int64>[B]."""
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits


def concat(parts: list[Rows]) -> Rows:
    """The rows of all parts, one after another. The parts (at least one) have the same columns."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Values] = {}
    for name, first in parts[0].columns.items():
        if isinstance(first, Ragged):
            columns[name] = _concat_lists([part.ragged(name) for part in parts])
        else:
            columns[name] = np.concatenate([part.columns[name] for part in parts])
    return Rows(columns, sum(part.num_rows for part in parts))


def _concat_lists(pieces: list[Ragged]) -> Ragged:
    lengths = np.concatenate([piece.lengths() for piece in pieces])
    return Ragged(np.concatenate([piece.values for piece in pieces]), splits_of(lengths))


class Block:
    """Rows in several parts that can be taken in any order. Long lists are copied once, directly from their part."""

    def __init__(self, parts: list[Rows]) -> None:
        num_rows = sum(part.num_rows for part in parts)
        self.columns: dict[str, Values | _Lists] = {}
        for name, column in parts[0].columns.items():
            if isinstance(column, Ragged):
                pieces = [part.ragged(name) for part in parts]
                long = sum(len(piece.values) for piece in pieces) > _LONG_ROW * num_rows
                self.columns[name] = _Lists(pieces) if long else _concat_lists(pieces)
            else:
                self.columns[name] = np.concatenate([part.columns[name] for part in parts])

    def take(self, order: np.ndarray) -> Rows:
        """The rows `order` <int64>[B], in that order."""
        columns: dict[str, Values] = {}
        for name, column in self.columns.items():
            columns[name] = column[order] if isinstance(column, np.ndarray) else column.take(order)
        return Rows(columns, len(order))


class _Lists:
    """A list column in pieces."""

    def __init__(self, pieces: list[Ragged]) -> None:
        self._values = [piece.values for piece in pieces]
        self._piece = np.repeat(np.arange(len(pieces)), [len(piece.row_splits) - 1 for piece in pieces])
        self._begins = np.concatenate([piece.row_splits[:-1] for piece in pieces])
        self._ends = np.concatenate([piece.row_splits[1:] for piece in pieces])

    def take(self, order: np.ndarray) -> Ragged:
        if not len(order):
            return Ragged(self._values[0][:0], np.zeros(1, np.int64))
        begins, ends = self._begins[order], self._ends[order]
        splits = splits_of(ends - begins)
        places = zip(self._piece[order].tolist(), begins.tolist(), ends.tolist())
        return Ragged(_joined([self._values[piece][begin:end] for piece, begin, end in places], splits[-1]), splits)


class RowQueue:
    """A first-in, first-out queue. Rows enter in chunks and leave in blocks of any size."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._chunks: collections.deque[Rows] = collections.deque()
        self._begin = 0  # rows of the first chunk that were already taken

    def append(self, rows: Rows) -> None:
        self._chunks.append(rows)
        self.num_rows += rows.num_rows

    def pop(self, count: int) -> Block:
        """Removes the next `count` >= 1 rows. The queue must have at least `count` rows."""
        self.num_rows -= count
        parts = []
        while count:
            chunk = self._chunks[0]
            end = min(self._begin + count, chunk.num_rows)
            parts.append(chunk.slice(self._begin, end))
            count -= end - self._begin
            self._begin = end
            if end == chunk.num_rows:
                self._chunks.popleft()
                self._begin = 0
        return Block(parts)


GOOD = "\0good"  # extra column <bool>[B] under policy "skip": False for a skipped row


def rows_from_arrow(
    batch: pa.RecordBatch,
    columns: Sequence[Column],
    where: str,
    bad: BadInput,
    first_row: int,
    partitions: Mapping[str, str],
) -> Rows:
    """Converts a record batch, which has all columns but those of `partitions`, the values of the file's folders.

    A skipped row has no values, and False in the column GOOD. Messages count rows from `first_row`.
    """
    stored = [column for column in columns if batch.schema.get_field_index(column.name) >= 0]
    good = _good_rows(batch, stored, where, bad, first_row)
    skips_rows = not good.all()
    if skips_rows:
        batch = batch.filter(pa.array(good))
    values: dict[str, Values] = {}
    for column in columns:
        if column in stored:
            values[column.name] = _to_numpy(batch.column(column.name), column)
        else:
            text = partitions[column.name]
            value = _fingerprints(pa.array([text])) if column.dtype == "string" else np.array([int(text)])
            values[column.name] = np.repeat(value, batch.num_rows)
        if skips_rows:
            values[column.name] = _spread(values[column.name], good)
    return Rows({**values, GOOD: good} if bad.skips else values, len(good))


def empty_rows(columns: Sequence[Column], num_rows: int = 0) -> Rows:
    """Rows with empty lists and zeros, such as the batch of a rank without rows left."""
    values: dict[str, Values] = {}
    for column in columns:
        if column.ragged:
            values[column.name] = Ragged(np.empty(0, column.value_dtype), np.zeros(num_rows + 1, np.int64))
        else:
            values[column.name] = np.zeros(num_rows, column.value_dtype)
    return Rows(values, num_rows)


def skipped_rows(columns: Sequence[Column], num_rows: int) -> Rows:
    """Rows that could not be read, in the form of rows_from_arrow's skipped rows."""
    return Rows({**empty_rows(columns, num_rows).columns, GOOD: np.zeros(num_rows, bool)}, num_rows)


def _good_rows(
    batch: pa.RecordBatch, columns: Sequence[Column], where: str, bad: BadInput, first_row: int
) -> np.ndarray:
    """<bool>[B], False for rows to skip."""
    good = np.ones(batch.num_rows, bool)

    def refuse(rows: np.ndarray, fault: str) -> None:
        good[rows] = False
        numbers = (first_row + np.flatnonzero(rows)).tolist()
        bad.handle(where, f"{fault} Row {numbers[0]} is the first.", numbers)

    remedy = "Write a default value instead of null (an id, 0.0, or an empty list)."
    for column in columns:
        array = batch.column(column.name)
        prefix = f"column {column.name!r} has"
        if array.null_count:
            nulls = array.is_null().to_numpy(zero_copy_only=False)
            refuse(nulls, f"{prefix} {int(nulls.sum())} null {'rows' if column.ragged else 'values'}. {remedy}")
        if column.ragged and array.values.null_count:
            values = array.flatten()  # Values of null rows do not count.
            if values.null_count:
                rows = pc.list_parent_indices(array).to_numpy()[values.is_null().to_numpy(zero_copy_only=False)]
                nulls = np.bincount(rows, minlength=len(array)).astype(bool)
                refuse(nulls, f"{prefix} {values.null_count} null values inside its lists. {remedy}")
    for column in columns:
        if column.aligned_with is not None and batch.schema.get_field_index(column.aligned_with) >= 0:
            lengths, expected = (
                np.diff(batch.column(name).offsets.to_numpy(zero_copy_only=True))
                for name in (column.name, column.aligned_with)
            )
            differ = (lengths != expected) & good
            if differ.any():
                row = int(np.flatnonzero(differ)[0])
                refuse(
                    differ,
                    f"column {column.name!r} must have as many values as {column.aligned_with!r} in every row, got "
                    f"{lengths[row]} and {expected[row]} in one. Write both lists together.",
                )
    return good


def _to_numpy(array: pa.Array, column: Column) -> Values:
    if not column.ragged:
        return _flat(array, column)
    # An array may be a slice of a larger one. Its offsets then start above 0, and `values` belongs to the larger one.
    offsets = array.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    ragged = Ragged(_flat(values, column), offsets - offsets[0])
    return ragged if column.keep_last is None else ragged.keep_last(column.keep_last)


def _fingerprints(array: pa.Array) -> np.ndarray:
    from tf_fusedrec.data.fingerprint import fingerprint_arrow  # loads TensorFlow

    return fingerprint_arrow(array)


def _flat(array: pa.Array, column: Column) -> np.ndarray:
    return _fingerprints(array) if column.dtype == "string" else array.to_numpy(zero_copy_only=True)


def _spread(column: Values, good: np.ndarray) -> Values:
    """Moves rows to the places where good <bool>[B] is True. The other places get no values."""
    if isinstance(column, Ragged):
        lengths = np.zeros(len(good), np.int64)
        lengths[good] = column.lengths()
        return Ragged(column.values, splits_of(lengths))
    values = np.zeros(len(good), column.dtype)
    values[good] = column
    return values
