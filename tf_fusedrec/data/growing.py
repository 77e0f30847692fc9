"""A growing folder: partitions (hours, days) that arrive during training, in the same order on all ranks.

    for partition in GrowingFolder("clicks", poll_s=30):
        folder = ParquetFolder(partition.path, columns)
        check_same_files(folder)
        batches = TokenBatches(folder, length_columns=["item_id"], target_tokens_per_rank=4096)
        model.fit(batches.dataset(), initial_epoch=partition.number, epochs=partition.number + 1, ...)

A partition is a folder at any depth (day=2026-11-21/hour=07). It is complete when it has the marker, such as the
_SUCCESS of Spark and Hive jobs. With marker=None it is complete when it appears, for writers that fill a hidden folder
and rename it. With files=(".csv", ".parquet"), every file is a partition, complete when it has stopped changing.
Numbers in names compare as numbers, so hour=10 follows hour=9.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyarrow import fs

from tf_fusedrec.data import filesystems
from tf_fusedrec.data.parquet import ParquetFolder
from tf_fusedrec.exchange import collectives

STOP = "_STOP"  # A file of this name ends the folder after all complete partitions.
_LOG = logging.getLogger("tf_fusedrec.data")


class Partition(NamedTuple):
    """A partition of a GrowingFolder."""

    number: int  # counted from 0, across resumptions
    name: str  # path below the folder
    path: str  # path for ParquetFolder


class GrowingFolder:
    """Iterates over the complete partitions of a folder, in the order of their names, and waits for the next.

    Rank 0 polls the folder and broadcasts the result. All ranks get the same partitions and must iterate together. The
    iteration ends at the file _STOP, after max_partitions, or after timeout_s without a new partition.

    A late partition, which arrives after its successor in the order, is skipped with a warning in the log. With
    `after`, all partitions up to it are skipped, too.

    Args:
      path, filesystem: See ParquetFolder.
      marker: Name of the file that marks a complete partition; None takes every folder with Parquet files.
      files: Endings of files that are partitions themselves; () takes folders. A file is complete when two polls see
        the same size and time. Until then, those after it wait, too. `marker` has no effect then.
      poll_s: Seconds between two polls, > 0.
      timeout_s: Seconds to wait for one partition; None waits forever.
      max_partitions: Number of partitions in all, including the partitions of an earlier job; None for all.
      after: Last partition of an earlier job, to resume after it.

    Raises:
      ValueError: a number is out of range; on all ranks while iterating, the folder cannot be listed.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("growing/hour=9").mkdir(parents=True)
      >>> pathlib.Path("growing/hour=9/_SUCCESS").touch()
      >>> [partition.name for partition in fr.data.GrowingFolder("growing", max_partitions=1)]
      ['hour=9']
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        marker: str | None = "_SUCCESS",
        files: Sequence[str] = (),
        poll_s: float = 30.0,
        timeout_s: float | None = None,
        max_partitions: int | None = None,
        after: Partition | None = None,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        if not poll_s > 0:
            raise ValueError(f"poll_s must be > 0, got {poll_s}.")
        if timeout_s is not None and timeout_s < 0:
            raise ValueError(f"timeout_s must be >= 0, or None to wait for ever, got {timeout_s}.")
        if max_partitions is not None and max_partitions < 1:
            raise ValueError(f"max_partitions must be >= 1, or None for all, got {max_partitions}.")
        self._path, self._filesystem, self._marker = os.fspath(path).rstrip("/"), filesystem, marker
        self._files, self._last_poll = tuple(files), dict[str, tuple[int, int] | None]()
        self._poll_s, self._timeout, self._most = poll_s, timeout_s, max_partitions
        self._last = after
        self._seen: set[str] = set()  # names of yielded and skipped partitions

    def __iter__(self) -> Iterator[Partition]:
        while self._most is None or self._number() < self._most:
            name = self._wait()
            if name is None:
                return
            self._last = Partition(self._number(), name, f"{self._path}/{name}")
            yield self._last

    def before(self, partition: Partition) -> list[str]:
        """Paths of the complete partitions before one, in the order of their names. Not collective."""
        folder = filesystems.resolve(self._path, self._filesystem)
        return [f"{self._path}/{name}" for name in self._partitions(folder) if _order(name) < _order(partition.name)]

    def _partitions(self, folder: filesystems.Folder) -> dict[str, tuple[int, int] | None]:
        """Size and time of partitions that are files, and None for folders, in the order of their names."""
        states: dict[str, tuple[int, int] | None] = {}
        if self._files:
            states.update(filesystems.files_with(folder, self._files))
        else:
            states.update(dict.fromkeys(filesystems.folders_with(folder, self._marker)))
        return {name: states[name] for name in sorted(states, key=_order)}

    def _number(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    def _wait(self) -> str | None:
        """Name of the next partition, the same on all ranks; None at the end. Collective."""
        begin = time.monotonic()
        while True:
            # Rank 0 broadcasts every poll, so no rank waits in a collective for longer than one poll.
            poll = self._poll(time.monotonic() - begin) if collectives.rank() == 0 else (None, False, None)
            name, has_ended, error = collectives.all_gather_object(poll)[0]
            if error is not None:
                raise ValueError(error)
            if name is not None or has_ended:
                return name
            time.sleep(self._poll_s)

    def _poll(self, waited: float) -> tuple[str | None, bool, str | None]:
        """Polls the folder. Returns (name of the next partition, whether the folder has ended, error message)."""
        try:
            folder = filesystems.resolve(self._path, self._filesystem)
            stop = folder.filesystem.get_file_info(f"{folder.path}/{STOP}").type != fs.FileType.NotFound
            # The folder is listed after the check for STOP, because writers add STOP after the last partition.
            partitions = self._partitions(folder)
        except (ValueError, OSError) as caught:
            return None, True, f"{self._path}: cannot list new partitions ({caught}). Check that the folder exists."
        before, self._last_poll = self._last_poll, partitions
        names = list(itertools.takewhile(lambda name: partitions[name] in (None, before.get(name)), partitions))
        for name in names:
            if self._last is None or _order(name) > _order(self._last.name):
                self._seen.add(name)
                return name, False, None
            if name not in self._seen:
                self._seen.add(name)
                _LOG.warning("skipped: %s/%s: it arrived after its successor %s", self._path, name, self._last[1])
        if len(names) == len(partitions) and (stop or (self._timeout is not None and waited >= self._timeout)):
            why = f"{STOP} exists" if stop else f"no new partition arrived in {self._timeout} s"
            _LOG.info("%s ends after %d partitions: %s", self._path, self._number(), why)
            return None, True, None
        return None, False, None


def check_same_files(folder: ParquetFolder) -> None:
    """Checks that all ranks see the same files and row groups. Collective.

    Raises:
      ValueError: on all ranks, if two ranks see different ones.
    """
    digests = collectives.all_gather_object(folder.contents())
    for rank, contents in enumerate(digests):
        if contents != digests[0]:
            raise ValueError(
                f"{folder.path}: rank {rank} sees other Parquet files or row groups than rank 0. Write the marker of a "
                "partition after all hosts see all of its files, and do not change them afterwards."
            )


def _order(name: str) -> list[tuple[int, int, str]]:
    """Sort key of a name, in which numbers compare as numbers."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
