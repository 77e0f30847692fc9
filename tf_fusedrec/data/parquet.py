"""Parquet shards as a stream of Rows, shared among ranks: the first stage of the input pipeline.

Files are read row group by row group, and a row group in pieces of READ_ROWS rows, so a data set larger than memory
needs no more of it than a small one. What a rank reads is a pure function of (seed, epoch, rank, world size):

  1. The row groups of all files stand in one line: by file name, or with a seed in the epoch's random order, which is
     the same on all ranks.
  2. The line is cut into world_size parts of equal rows (they differ by one row at most). A cut may fall inside a
     row group; then two ranks read that group and each takes its rows. So ranks are balanced whatever the size of
     the row groups, and fewer row groups than ranks need no other rule.
  3. With a seed, a rank shuffles its part inside a buffer of shuffle_rows rows.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data import batching
from tf_fusedrec.data.columns import Column, check_columns, check_schema, rows_from_arrow
from tf_fusedrec.data.rows import Rows, concat

READ_ROWS = 512  # rows decoded at once; a few megabytes for rows of some hundred tokens


class ParquetFolder:
    """The `*.parquet` files of one folder, read by one of world_size ranks.

    Args:
      path: the folder; files are taken in the order of their names, those starting with "." or "_" are left out.
      columns: what to read. Other columns of the files are never touched.
      rank, world_size: this rank reads its part of every epoch; the parts of all ranks are every row exactly once.
      shuffle_seed: None reads in file order; an integer >= 0 gives every epoch its own order.
      shuffle_rows: rows of the shuffle buffer, held in memory. More rows mix better.

    Raises:
      ValueError: no such folder, no Parquet file in it, a file that cannot be read, a column that is missing or of
        another type (all files are checked here, before the first row); while reading: nulls, a corrupt page.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        columns: Sequence[Column],
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        shuffle_rows: int = 8192,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size - 1 = {world_size - 1}, got {rank}.")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed must be >= 0, or None for file order, got {shuffle_seed}.")
        if shuffle_rows < 1:
            raise ValueError(f"shuffle_rows must be >= 1, got {shuffle_rows}.")
        check_columns(columns)
        self.path = pathlib.Path(path)
        self.columns = tuple(columns)
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle_rows = shuffle_seed, shuffle_rows
        self._groups: list[tuple[pathlib.Path, int]] = []  # (file, row group in the file) in file order
        group_rows: list[int] = []
        for file in _parquet_files(self.path):
            with _open(file) as parquet:
                check_schema(file, parquet.schema_arrow, self.columns)
                for group in range(parquet.num_row_groups):
                    self._groups.append((file, group))
                    group_rows.append(parquet.metadata.row_group(group).num_rows)
        self._group_rows = np.array(group_rows, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of all files, hence of all ranks together."""
        return int(self._group_rows.sum())

    def read(self, epoch: int = 0, columns: Sequence[Column] | None = None) -> Iterator[Rows]:
        """This rank's rows of one epoch in chunks; fewer columns (a part of self.columns) change no row's place."""
        chunks = self._read_in_order(self._plan(epoch), columns or self.columns)
        if self._seed is None:
            return chunks
        rng = np.random.default_rng([self._seed, epoch, self._world_size, self._rank])
        return _shuffled(chunks, self._shuffle_rows, rng)

    def count_batches(
        self,
        *,
        epochs: int,
        length_columns: Sequence[str],
        target_tokens: int,
        extra_tokens: int = 0,
        first_epoch: int = 0,
    ) -> int:
        """The most batches that this rank has in one of these epochs; reads the length columns only.

        Arguments as in token_balanced_dataset. Take the maximum over ranks as steps_per_epoch: then no rank waits
        for another one's batch that never comes.
        """
        batching.check_length_columns(length_columns, self.columns)
        wanted = [column for column in self.columns if column.name in length_columns]
        most = 0
        # Without a seed all epochs are the same, so one is enough.
        for epoch in range(first_epoch, first_epoch + (epochs if self._seed is not None else min(epochs, 1))):
            lengths = (batching.row_tokens(rows, length_columns, extra_tokens) for rows in self.read(epoch, wanted))
            most = max(most, sum(1 for _ in batching.batch_sizes(lengths, target_tokens)))
        return most

    def _plan(self, epoch: int) -> Iterator[tuple[int, int, int]]:
        """This rank's (row group, first row, end row) of an epoch, in reading order."""
        order = np.arange(len(self._groups))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)  # the same on all ranks
        ends = np.cumsum(self._group_rows[order])
        total = self.num_rows
        part_begin = total * self._rank // self._world_size
        part_end = total * (self._rank + 1) // self._world_size
        for group, end in zip(order.tolist(), ends.tolist()):
            start = end - int(self._group_rows[group])
            first, last = max(start, part_begin), min(end, part_end)
            if first < last:
                yield group, first - start, last - start

    def _read_in_order(self, plan: Iterator[tuple[int, int, int]], columns: Sequence[Column]) -> Iterator[Rows]:
        names = [column.name for column in columns]
        for index, first, last in plan:
            file, group = self._groups[index]
            where = f"{file}, row group {group}"
            with _open(file) as parquet, _readable(where):
                begin = 0
                for batch in parquet.iter_batches(batch_size=READ_ROWS, row_groups=[group], columns=names):
                    end = begin + batch.num_rows
                    if max(begin, first) < min(end, last):
                        rows = rows_from_arrow(batch, columns, where)
                        yield rows.slice(max(begin, first) - begin, min(end, last) - begin)
                    begin = end
                    if begin >= last:
                        break


def _shuffled(chunks: Iterator[Rows], buffer_rows: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Fills a buffer of buffer_rows rows, hands it out in random order, fills it again."""
    buffer: list[Rows] = []
    held = 0
    for chunk in chunks:
        buffer.append(chunk)
        held += chunk.num_rows
        if held >= buffer_rows:
            yield from _permuted(concat(buffer), rng)
            buffer, held = [], 0
    if held:
        yield from _permuted(concat(buffer), rng)


def _permuted(rows: Rows, rng: np.random.Generator) -> Iterator[Rows]:
    order = rng.permutation(rows.num_rows)
    # In pieces, so that the cost of a large buffer is spread over the batches made of it.
    for begin in range(0, rows.num_rows, READ_ROWS):
        yield rows.take(order[begin : begin + READ_ROWS])


def _parquet_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if not folder.is_dir():
        raise ValueError(
            f"path must be a folder of Parquet files, got {str(folder)!r}, which is "
            f"{'a file' if folder.exists() else 'not there'}. Name the folder, for example <data set>/train."
        )
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith((".", "_")))
    if not files:
        raise ValueError(
            f"path {str(folder)!r} has no *.parquet file. Write one with python -m tf_fusedrec.data.convert, "
            "or name the folder that holds the shards."
        )
    return files


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """Turns what Arrow raises on a damaged file into a ValueError that names the place."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{where}: not readable as Parquet ({error}). The file is damaged or was cut short: write it again."
        ) from error


def _open(file: pathlib.Path) -> pq.ParquetFile:
    with _readable(str(file)):
        # Checksums are verified where the writer stored them, as this package's does.
        return pq.ParquetFile(file, page_checksum_verification=True)
