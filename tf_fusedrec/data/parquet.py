"""A folder of Parquet files as rows shared among ranks: what is there, whether it can be used, how long its rows are.

What a rank reads is a pure function of (seed, epoch, files) and of what the plan of the epoch gives it (plan.py). Files
are listed and their footers read when the folder is made; lengths are read once; everything else streams (reading.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from pyarrow import fs

from tf_fusedrec.data import files
from tf_fusedrec.data.arrow_rows import GOOD, empty_rows
from tf_fusedrec.data.bad_input import BadInput
from tf_fusedrec.data.columns import Column, check_columns, check_schema
from tf_fusedrec.data.order import EpochOrder
from tf_fusedrec.data.reading import (
    GroupReader,
    Interval,
    PositionReader,
    RowGroup,
    joined_rows,
    read_ahead,
    read_groups,
)
from tf_fusedrec.data.rows import Ragged, Rows


class ParquetFolder:
    """The `*.parquet` files of one folder and the folders below it, read by one of world_size ranks.

    Args:
      path: a local folder or a URI (hdfs://, s3://, gs://), see files.py. Files are taken in the order of their names.
      columns: what to read. Other columns of the files are never touched.
      rank, world_size: who reads.
      shuffle_seed: None reads in file order; an integer >= 0 gives every epoch its own order (order.py).
      shuffle_rows: rows that are mixed with each other, held in memory. More rows mix better.
      bad_rows: "error" refuses bad input; "skip" leaves it out, named and counted in the log. Bad are: nulls, lists
        that are `aligned_with` each other and differ in length, a row longer than the target of its batches, a file
        that vanished, is damaged or has other types, a row group without rows in a file that has rows.
      threads: that decode row groups ahead.
      filesystem: see files.resolve.

    Raises:
      ValueError: no such folder, no Parquet file in it; with "error", a file that cannot be read, a column that is
        missing or of another type (all files are checked here, before the first row); while reading: the others.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        columns: Sequence[Column],
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        shuffle_rows: int = 8192,
        bad_rows: str = "error",
        threads: int = 2,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size - 1 = {world_size - 1}, got {rank}.")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed must be >= 0, or None for file order, got {shuffle_seed}.")
        for name, value in (("shuffle_rows", shuffle_rows), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        check_columns(columns)
        self.columns = tuple(columns)
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle_rows = shuffle_seed, shuffle_rows
        self.bad = BadInput(bad_rows)
        self._threads = threads
        self._folder = files.resolve(path, filesystem)
        self._groups: list[RowGroup] = []
        found = files.parquet_files(self._folder)
        for groups in read_ahead((lambda file=file: self._row_groups(file) for file in found), threads):  # type: ignore[misc]
            self._groups += groups
        self._group_rows = np.array([group.num_rows for group in self._groups], np.int64)

    @property
    def path(self) -> str:
        return self._folder.name

    @property
    def num_rows(self) -> int:
        """Rows of all files, hence of all ranks together."""
        return int(self._group_rows.sum())

    def contents(self) -> str:
        """Sixteen hexadecimal digits of the names of the files and the sizes of their row groups."""
        return hashlib.sha256(repr(self._groups).encode()).hexdigest()[:16]

    def order(self, epoch: int) -> EpochOrder:
        """The order of all ranks' rows in an epoch."""
        return EpochOrder(self._group_rows, self.seed, epoch, self.shuffle_rows)

    def own_part(self) -> Interval:
        """Positions that are this rank's when rows are shared equally; all ranks' differ by one row at most."""
        return (
            self.num_rows * self.rank // self.world_size,
            self.num_rows * (self.rank + 1) // self.world_size,
        )

    def read(self, epoch: int = 0) -> Iterator[Rows]:
        """This rank's equal share of the rows of an epoch, in chunks."""
        begin, end = self.own_part()
        # No chunk lies across two blocks, which would cost another copy.
        starts = sorted({begin, *range(-(-begin // self.shuffle_rows) * self.shuffle_rows, end, self.shuffle_rows)})
        chunks = (np.arange(start, stop) for start, stop in zip(starts, [*starts[1:], end]))
        return (rows for rows in self.read_positions(epoch, [(begin, end)], chunks) if rows.num_rows)

    def read_positions(
        self, epoch: int, intervals: Sequence[Interval], positions: Iterable[np.ndarray]
    ) -> Iterator[Rows]:
        """The rows of an epoch at each of `positions` <int64>[n], rising inside `intervals`, without bad ones."""
        reader = GroupReader(self._folder, self._groups, self.columns, self.bad)
        rows = PositionReader(reader, self._groups, self.order(epoch), intervals, self._threads)
        nothing = empty_rows(self.columns)
        try:
            for wanted in positions:
                yield joined_rows(rows.take(wanted), nothing)
        finally:
            rows.close()

    def tokens(self, length_columns: Sequence[str], extra_tokens: int = 0) -> np.ndarray:
        """Tokens of every row of the folder, from its length columns alone.

        Args:
          length_columns: list columns, whose lengths after keep_last are tokens; or int64 columns that hold such
            numbers, which are much quicker to read than lists.
          extra_tokens: tokens that every row has besides.

        Returns:
          <int64>[num_rows] in file order; at least 1, but 0 for rows that bad_rows="skip" leaves out.

        Raises:
          ValueError: a name that is no such column; nulls, damaged files and negative numbers unless they are skipped.
        """
        wanted = _length_columns(length_columns, self.columns)
        reader = GroupReader(self._folder, self._groups, wanted, self.bad)
        spans = ((number, 0, group.num_rows) for number, group in enumerate(self._groups) if group.num_rows)
        tokens = np.zeros(self.num_rows, np.int64)
        at = 0
        for rows in read_groups(reader, self._groups, spans, self.shuffle_rows, self._threads):
            part = np.full(rows.num_rows, extra_tokens, np.int64)
            for column in rows.columns.values():
                if isinstance(column, Ragged):
                    part += column.lengths()
                elif column.dtype == np.int64:
                    part += column
            if part.min(initial=0) < 0:
                raise ValueError(
                    f"{self.path}: length_columns {list(length_columns)} hold a negative number of tokens, "
                    f"{part.min()}. Store the number of tokens of each row."
                )
            # Rows without tokens would fill a batch for ever without reaching its target: they count one.
            part = np.maximum(part, 1)
            good = rows.columns.get(GOOD)
            assert not isinstance(good, Ragged)
            tokens[at : at + len(part)] = part if good is None else part * good
            at += len(part)
        return tokens

    def groups_of(self, rows: np.ndarray) -> np.ndarray:
        """<int64>[n] the number of the row group of each row <int64>[n], both counted in file order."""
        return np.searchsorted(np.cumsum(self._group_rows), rows, side="right")

    def place(self, group: int) -> tuple[str, int]:
        """File and row group in words, and its first row, of a row group; both counted in file order."""
        file, number, _ = self._groups[group]
        return f"{self.path}/{file}, row group {number}", int(self._group_rows[:group].sum())

    def _row_groups(self, file: str) -> list[RowGroup]:
        """The row groups of a file, its schema checked."""
        where = f"{self.path}/{file}"
        sizes: list[int] = []
        try:
            with files.readable(where), self._folder.open(file) as parquet:
                sizes = [parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
                check_schema(where, parquet.schema_arrow, self.columns, files.partition_values(file))
        except ValueError as error:
            self.bad.meet(where, str(error).removeprefix(f"{where}: "), range(sum(sizes)))
            return []
        for number, size in enumerate(sizes):
            if not size and any(sizes):
                self.bad.meet(
                    f"{where}, row group {number}",
                    f"holds no rows of {[column.name for column in self.columns]}, though "
                    "the file has rows. Whoever wrote it lost them or flushed an empty buffer: write it again.",
                )
        return [RowGroup(file, number, size) for number, size in enumerate(sizes)]


def _length_columns(names: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    """The columns of these names; refuses one that tells no number of tokens."""
    able = {column.name: column for column in columns if column.ragged or column.dtype == "int64"}
    lists = [column.name for column in columns if column.ragged]
    for name in names:
        if name not in able:
            raise ValueError(
                f"length_columns names {name!r}, which is not a list column of this data set, nor an int64 one; lists "
                f"are {lists}. Name the list columns whose values become tokens, or columns that hold their number."
            )
    if not names:
        raise ValueError(f"length_columns must name at least one list column of {lists}, got none.")
    return [able[name] for name in names]
