"""A folder of Parquet files, divided by rows among ranks: lists and checks the files, and reads rows and lengths.

The rows of a rank are a pure function of (seed, epoch, files) and of the epoch's plan (plan.py). The constructor lists
the files and reads their footers. Lengths are read once; everything else streams (reading.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from pyarrow import fs

from tf_fusedrec.data import filesystems
from tf_fusedrec.data.columns import BadInput, Column, check_columns, check_schema
from tf_fusedrec.data.reading import (
    EpochOrder,
    GroupReader,
    Interval,
    PositionReader,
    RowGroup,
    read_ahead,
    read_groups,
)
from tf_fusedrec.data.rows import GOOD, Ragged, Rows, concat, empty_rows
from tf_fusedrec.exchange import collectives


class ParquetFolder:
    """The `*.parquet` files of one folder and the folders below it, read by one of several ranks.

    Args:
      path: Local folder or URI (hdfs://, s3://, gs://), see filesystems.py. Files are read in the order of their names.
      columns: Columns to read. Other columns of the files are never read.
      rank, ranks: Number of the reading rank, and number of ranks; None: those of this process.
      shuffle_seed: None reads in file order; an integer >= 0 gives every epoch its own order (reading.py).
      shuffle_rows: Rows per shuffled block, held in memory, >= 1. A larger block shuffles better.
      bad_rows: "error" refuses bad input; "skip" skips it, and the log names and counts it. Bad input is: a null;
        `aligned_with` lists of different lengths; a row longer than the target of its batches; a file that is missing,
        damaged or has other types; a row group without rows in a file with rows.
      threads: Number of threads that decode row groups ahead, >= 1.
      filesystem: See filesystems.resolve.

    Raises:
      ValueError: the folder does not exist or has no Parquet file. With "error", also: a file is unreadable, or a
        column is missing or has another type (checked for all files before the first row); other bad input, while
        reading.

    Examples:
      >>> import pathlib, pyarrow.parquet
      >>> pathlib.Path("clicks/day=1").mkdir(parents=True)
      >>> rows = pyarrow.table({"user": [7, 8, 9], "items": [[1, 2, 3], [2], [3, 3]]})
      >>> pyarrow.parquet.write_table(rows, "clicks/day=1/0.parquet")
      >>> columns = [fr.data.Column("user"), fr.data.Column("items", ragged=True, keep_last=200)]
      >>> folder = fr.data.ParquetFolder("clicks", columns, shuffle_seed=1)
      >>> cut = fr.data.StochasticLength("items", alpha=1.6, max_length=100)
      >>> batches = fr.data.TokenBatches(
      ...     folder, length_columns=["items"], target_tokens_per_rank=4, stochastic_length=cut
      ... )
      >>> sum(int(batch["user"].shape[0]) for batch in batches.dataset()), batches.steps_per_epoch
      (3, 2)
    """

    def __init__(
        self,
        path: str | os.PathLike,
        columns: Sequence[Column],
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle_seed: int | None = None,
        shuffle_rows: int = 8192,
        bad_rows: str = "error",
        threads: int = 2,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        rank = collectives.rank() if rank is None else rank
        ranks = collectives.size() if ranks is None else ranks
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must lie in 0..ranks - 1 = {ranks - 1}, got {rank}.")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed must be >= 0, or None for file order, got {shuffle_seed}.")
        for name, value in (("shuffle_rows", shuffle_rows), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        check_columns(columns)
        self.columns = tuple(columns)
        self.rank, self.ranks = rank, ranks
        self.seed, self.shuffle_rows = shuffle_seed, shuffle_rows
        self.bad = BadInput(bad_rows)
        self._threads = threads
        self._folder = filesystems.resolve(path, filesystem)
        self._groups: list[RowGroup] = []
        files = filesystems.parquet_files(self._folder)
        for groups in read_ahead((lambda file=file: self._row_groups(file) for file in files), threads):  # type: ignore[misc]
            self._groups += groups
        self._group_rows = np.array([group.num_rows for group in self._groups], np.int64)

    @property
    def path(self) -> str:
        return self._folder.name

    @property
    def num_rows(self) -> int:
        """Number of rows of all files, that is of all ranks together."""
        return int(self._group_rows.sum())

    def contents(self) -> str:
        """Digest, 16 hexadecimal digits, of the names of the files and the sizes of their row groups."""
        return hashlib.sha256(repr(self._groups).encode()).hexdigest()[:16]

    def order(self, epoch: int) -> EpochOrder:
        """The order of all ranks' rows in an epoch."""
        return EpochOrder(self._group_rows, self.seed, epoch, self.shuffle_rows)

    def own_part(self) -> Interval:
        """This rank's interval when rows are divided equally. The intervals of two ranks differ by at most one row."""
        return self.num_rows * self.rank // self.ranks, self.num_rows * (self.rank + 1) // self.ranks

    def read(self, epoch: int = 0) -> Iterator[Rows]:
        """This rank's equal share of the rows of an epoch, in chunks."""
        begin, end = self.own_part()
        # No chunk crosses the border of two blocks, which would cost another copy.
        starts = sorted({begin, *range(-(-begin // self.shuffle_rows) * self.shuffle_rows, end, self.shuffle_rows)})
        chunks = (np.arange(start, stop) for start, stop in zip(starts, [*starts[1:], end]))
        return (rows for rows in self.read_positions(epoch, [(begin, end)], chunks) if rows.num_rows)

    def read_positions(
        self, epoch: int, intervals: Sequence[Interval], positions: Iterable[np.ndarray]
    ) -> Iterator[Rows]:
        """Yields the rows of an epoch at each of `positions` <int64>[n], without bad rows.

        `intervals` contain all positions, which are ascending over all batches.
        """
        reader = GroupReader(self._folder, self._groups, self.columns, self.bad)
        rows = PositionReader(reader, self._groups, self.order(epoch), intervals, self._threads)
        nothing = empty_rows(self.columns)
        try:
            for batch in positions:
                parts = rows.take(batch)
                yield concat(parts) if parts else nothing
        finally:
            rows.close()

    def tokens(self, length_columns: Sequence[str], extra_tokens: int = 0) -> np.ndarray:
        """Tokens of every row of the folder, from its length columns only.

        Args:
          length_columns: Names of list columns, with as many tokens as values after keep_last, or of int64 columns with
            numbers of tokens, which are much faster to read.
          extra_tokens: Number of tokens to add to every row.

        Returns:
          <int64>[num_rows] in file order, at least 1; 0 for rows skipped by bad_rows="skip".

        Raises:
          ValueError: a name is not such a column; a number is negative; with bad_rows="error", a null or damaged file.
        """
        reader = GroupReader(self._folder, self._groups, _length_columns(length_columns, self.columns), self.bad)
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
            # A row without tokens counts as one token. Else such rows would fill a batch without reaching its target.
            part = np.maximum(part, 1)
            good = rows.columns.get(GOOD)
            assert not isinstance(good, Ragged)
            tokens[at : at + len(part)] = part if good is None else part * good
            at += len(part)
        return tokens

    def groups_of(self, rows: np.ndarray) -> np.ndarray:
        """Row group number <int64>[n] of each row <int64>[n], both counted in file order."""
        return np.searchsorted(np.cumsum(self._group_rows), rows, side="right")

    def place(self, group: int) -> tuple[str, int]:
        """Words that name the file and row group of a row group number, and its first row in file order."""
        file, number, _ = self._groups[group]
        return f"{self.path}/{file}, row group {number}", int(self._group_rows[:group].sum())

    def _row_groups(self, file: str) -> list[RowGroup]:
        """Lists the row groups of a file and checks its schema."""
        where = f"{self.path}/{file}"
        sizes: list[int] = []
        try:
            with filesystems.readable(where), self._folder.open(file) as parquet:
                sizes = [parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
                check_schema(where, parquet.schema_arrow, self.columns, filesystems.partition_values(file))
        except ValueError as error:
            self.bad.handle(where, str(error).removeprefix(f"{where}: "), range(sum(sizes)))
            return []
        for number, size in enumerate(sizes):
            if not size and any(sizes):
                self.bad.handle(
                    f"{where}, row group {number}",
                    f"holds no rows of {[column.name for column in self.columns]}, though "
                    "the file has rows. Its writer lost rows or flushed an empty buffer: write it again.",
                )
        return [RowGroup(file, number, size) for number, size in enumerate(sizes)]


def _length_columns(names: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    """The columns of these names. Raises ValueError for a column without numbers of tokens."""
    able = {column.name: column for column in columns if column.ragged or column.dtype == "int64"}
    lists = [column.name for column in columns if column.ragged]
    for name in names:
        if name not in able:
            raise ValueError(
                f"length_columns names {name!r}, which is neither a list column of this data set nor an int64 one; "
                f"lists are {lists}. Name the list columns whose values become tokens, or columns with their number."
            )
    if not names:
        raise ValueError(f"length_columns must name at least one list column of {lists}, got none.")
    return [able[name] for name in names]
