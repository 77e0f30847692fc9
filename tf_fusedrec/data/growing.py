"""A folder that grows: partitions (hours, days) that arrive while training runs, in order, the same on all ranks.

    for partition in GrowingFolder("clicks", poll_seconds=30):
        folder = ParquetFolder(partition.path, columns, rank=rank, world_size=ranks)
        check_same_files(folder)
        batches = TokenBatches(folder, length_columns=["item_id"], target_tokens=4096)
        model.fit(batches.dataset(), initial_epoch=partition.number, epochs=partition.number + 1, ...)

A partition is a folder at any depth (day=2026-11-21/hour=07). It counts when it is complete: when the marker lies in
it, as Spark and Hive jobs leave _SUCCESS, or with marker=None when it is there at all, for writers that fill a folder
of a hidden name and rename it. Numbers in names are compared as numbers, so that hour=10 comes after hour=9.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from pyarrow import fs

from tf_fusedrec.data import files
from tf_fusedrec.data.parquet import ParquetFolder
from tf_fusedrec.exchange import collectives

STOP = "_STOP"  # a file of this name in the folder ends it, when what is complete has been read
_LOG = logging.getLogger("tf_fusedrec.data")


class Partition(NamedTuple):
    """One of a GrowingFolder."""

    number: int  # counted from 0, over resumptions too
    name: str  # path below the folder
    path: str  # what ParquetFolder takes


class GrowingFolder:
    """The complete partitions of a folder in the order of their names; an iterator that waits for the next.

    Rank 0 looks, the others are told: all ranks get the same partitions, and must iterate together. It ends at the
    file _STOP, after max_partitions, or when timeout_seconds pass without a new one.

    A partition that comes after one behind it in the order is left out, named in the log (with `after`, so are those
    of the earlier job).

    Args:
      path, filesystem: as of ParquetFolder.
      marker: name of the file that says that a partition is complete; None takes every folder with Parquet files.
      poll_seconds: between two looks.
      timeout_seconds: of waiting for one partition; None waits for ever.
      max_partitions: to hand out in all, those before `after` included; None for all.
      after: the last partition of an earlier job; what is not behind it is left out.

    Raises:
      ValueError: a number out of range; on all ranks while iterating: the folder is gone.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        marker: str | None = "_SUCCESS",
        poll_seconds: float = 30.0,
        timeout_seconds: float | None = None,
        max_partitions: int | None = None,
        after: Partition | None = None,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds must be > 0, got {poll_seconds}.")
        if timeout_seconds is not None and timeout_seconds < 0:
            raise ValueError(f"timeout_seconds must be >= 0, or None to wait for ever, got {timeout_seconds}.")
        if max_partitions is not None and max_partitions < 1:
            raise ValueError(f"max_partitions must be >= 1, or None for all, got {max_partitions}.")
        self._path, self._filesystem, self._marker = os.fspath(path).rstrip("/"), filesystem, marker
        self._poll, self._timeout, self._most = poll_seconds, timeout_seconds, max_partitions
        self._last = after
        self._met: set[str] = set()  # handed out, or left out

    def __iter__(self) -> Iterator[Partition]:
        while self._most is None or self._number() < self._most:
            found = self._wait()
            if found is None:
                return
            self._last = Partition(self._number(), found, f"{self._path}/{found}")
            yield self._last

    def _number(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    def _wait(self) -> str | None:
        """The next partition's name; None at the end. All ranks get the same."""
        begin = time.monotonic()
        while True:
            # The others are told at every look, found or not: so nobody waits in a collective longer than that.
            look: tuple[str | None, bool, str | None] = (None, False, None)
            if collectives.rank() == 0:
                look = self._look(time.monotonic() - begin)
            found, ended, error = collectives.all_gather_object(look)[0]
            if error is not None:
                raise ValueError(error)
            if found is not None or ended:
                return found
            time.sleep(self._poll)

    def _look(self, waited: float) -> tuple[str | None, bool, str | None]:
        """(the next partition, whether there will be none, what went wrong)."""
        try:
            folder = files.resolve(self._path, self._filesystem)
            stop = folder.filesystem.get_file_info(f"{folder.path}/{STOP}").type != fs.FileType.NotFound
            names = sorted(
                files.folders_with(folder, self._marker), key=_order
            )  # after the look for STOP, which is written behind the last of them
        except (ValueError, OSError) as caught:
            return None, True, f"{self._path}: cannot look for new partitions ({caught})."
        for name in names:
            if self._last is None or _order(name) > _order(self._last.name):
                self._met.add(name)
                return name, False, None
            if name not in self._met:
                self._met.add(name)
                _LOG.warning("left out: %s/%s: %s, behind it in the order, came first", self._path, name, self._last[1])
        if stop or (self._timeout is not None and waited >= self._timeout):
            why = f"{STOP} is there" if stop else f"no new partition came in {self._timeout} s"
            _LOG.info("%s ends after %d partitions: %s", self._path, self._number(), why)
            return None, True, None
        return None, False, None


def check_same_files(folder: ParquetFolder) -> None:
    """Refuses a folder in which ranks see different files or row groups. All ranks call it.

    Raises:
      ValueError: on all ranks.
    """
    seen = collectives.all_gather_object(folder.contents())
    for rank, contents in enumerate(seen):
        if contents != seen[0]:
            raise ValueError(
                f"{folder.path}: rank {rank} sees other Parquet files or row groups than rank 0. Write the marker of a "
                "partition after all of its files are visible to all hosts, and leave them as they are then."
            )


def _order(name: str) -> list[tuple[int, int, str]]:
    """Key of a name: numbers in it are compared as numbers."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
