"""Rows held as NumPy columns: what the Parquet reader hands to the batcher, and the batcher to TensorFlow.

A scalar column is one array [B]; a list column is its values [T] and row_splits [B+1]. Every function here
works on whole arrays, so nothing on the way from the file to the batch loops over values in Python.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Union

import numpy as np

_TENSOR_ALIGNMENT = 64  # bytes
_LONG_ROW = 64  # values; from about there one copy for each row is faster than an index for each value


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One list column. Row b is values[row_splits[b]:row_splits[b + 1]]."""

    values: np.ndarray  # <dtype>[T]
    row_splits: np.ndarray  # <int64>[B+1], from 0 to T, never decreasing

    def lengths(self) -> np.ndarray:
        """<int64>[B] values of each row."""
        return np.diff(self.row_splits)

    def slice(self, begin: int, end: int) -> "Ragged":
        """Rows begin..end, without copying values."""
        splits = self.row_splits[begin : end + 1]
        return Ragged(self.values[splits[0] : splits[-1]], splits - splits[0])

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """The rows values[starts[i]:starts[i] + lengths[i]], in that order. starts, lengths: <int64>[B']."""
        splits = splits_of(lengths)
        if splits[-1] > _LONG_ROW * len(lengths):
            ends = starts + lengths
            rows = [self.values[begin:end] for begin, end in zip(starts.tolist(), ends.tolist())]
            return Ragged(np.concatenate(rows, out=_aligned(splits[-1], self.values.dtype)), splits)
        # Value t of the result lies at starts[row of t] + (t - splits[row of t]).
        source = np.repeat(starts - splits[:-1], lengths)
        source += np.arange(splits[-1])
        return Ragged(self.values[source], splits)

    def take(self, order: np.ndarray) -> "Ragged":
        """The rows `order` <int64>[B'], in that order."""
        return self.gather(self.row_splits[order], self.lengths()[order])

    def keep_last(self, count: int) -> "Ragged":
        """Each row's last `count` values; a shorter row stays whole."""
        lengths = self.lengths()
        if lengths.max(initial=0) <= count:
            return self
        kept = np.minimum(lengths, count)
        return self.gather(self.row_splits[1:] - kept, kept)


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised array <dtype>[size] where TensorFlow takes it as a tensor without copying it."""
    memory = np.empty(size * dtype.itemsize + _TENSOR_ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _TENSOR_ALIGNMENT
    return memory[begin : begin + size * dtype.itemsize].view(dtype)


Values = Union[np.ndarray, Ragged]


@dataclasses.dataclass(frozen=True)
class Rows:
    """num_rows rows: scalar columns <dtype>[B] and list columns, by name."""

    columns: Mapping[str, Values]
    num_rows: int

    def ragged(self, name: str) -> Ragged:
        """The list column `name`; the caller knows from its Column that it is one."""
        column = self.columns[name]
        assert isinstance(column, Ragged), f"column {name!r} is a scalar"
        return column

    def slice(self, begin: int, end: int) -> "Rows":
        """Rows begin..end, without copying values."""
        columns = {
            name: column.slice(begin, end) if isinstance(column, Ragged) else column[begin:end]
            for name, column in self.columns.items()
        }
        return Rows(columns, end - begin)

    def take(self, order: np.ndarray) -> "Rows":
        """The rows `order` <int64>[B'], in that order."""
        columns = {
            name: column.take(order) if isinstance(column, Ragged) else column[order]
            for name, column in self.columns.items()
        }
        return Rows(columns, len(order))


def splits_of(lengths: np.ndarray) -> np.ndarray:
    """<int64>[B+1] row_splits of rows with these lengths <int64>[B]."""
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return splits


def ragged_from_groups(values: np.ndarray, group: np.ndarray, num_groups: int) -> Ragged:
    """Values <dtype>[T] sorted by group <int64>[T] become one row per group 0..num_groups; some may be empty."""
    return Ragged(values, splits_of(np.bincount(group, minlength=num_groups)))


def concat(parts: list[Rows]) -> Rows:
    """The rows of all parts, one after another. The parts (at least one) have the same columns."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Values] = {}
    for name, first in parts[0].columns.items():
        if isinstance(first, Ragged):
            pieces = [part.ragged(name) for part in parts]
            lengths = np.concatenate([piece.lengths() for piece in pieces])
            columns[name] = Ragged(np.concatenate([piece.values for piece in pieces]), splits_of(lengths))
        else:
            columns[name] = np.concatenate([part.columns[name] for part in parts])
    return Rows(columns, sum(part.num_rows for part in parts))


class RowQueue:
    """First in, first out; rows enter in chunks and leave in batches of any size."""

    def __init__(self) -> None:
        self._chunks: collections.deque[Rows] = collections.deque()
        self._begin = 0  # rows of the first chunk that have already left

    def append(self, rows: Rows) -> None:
        self._chunks.append(rows)

    def pop(self, count: int) -> Rows:
        """The next `count` (at least one) rows; the caller appended at least so many."""
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
        return concat(parts)


def rows_in_chunks(rows: Rows, size: int) -> Iterable[Rows]:
    """Cuts rows into chunks of `size`; the last may be shorter."""
    for begin in range(0, rows.num_rows, size):
        yield rows.slice(begin, min(begin + size, rows.num_rows))
