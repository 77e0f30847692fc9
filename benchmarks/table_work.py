"""One step's work on a table: ids, gradients, and the bytes that every implementation must move. NumPy only."""

from __future__ import annotations

import pathlib
import re
import threading
from typing import NamedTuple

import numpy as np

from benchmarks.synthetic import ZipfIds, id_of

IDS_PER_STEP = 81_920
DIM = 64
ZIPF_ALPHA = 1.05
INITIAL_VALUE = 0.05
LEARNING_RATE = 0.05
BATCHES = 16  # different ones, taken in turn
_LINE = 64  # bytes of a cache line


class Work(NamedTuple):
    """Batches of ids, all of which have a row, and the gradients of their rows."""

    ids: list[np.ndarray]  # BATCHES times <int64>[N]
    gradients: np.ndarray  # <float32>[N, D]

    @property
    def distinct(self) -> float:
        """Distinct ids of a batch, mean over batches."""
        return float(np.mean([len(np.unique(ids)) for ids in self.ids]))


def all_ids(rows: int) -> np.ndarray:
    """<int64>[rows], every id that `make_work` draws, shuffled: frequent ids do not become neighbours in memory."""
    return id_of(np.random.default_rng(1).permutation(rows))


def make_work(rows: int, *, n: int = IDS_PER_STEP, dim: int = DIM, uniform: bool = False) -> Work:
    """Batches of n ids out of `rows`, by zipf(1.05) or all equally likely.

    Gradients are small integers over 64: their sums are exact in any order, so that results may be compared closely.
    """
    random = np.random.default_rng(0)
    if uniform:
        ids = [id_of(random.integers(0, rows, n)) for _ in range(BATCHES)]
    else:
        zipf = ZipfIds(rows, ZIPF_ALPHA)
        ids = [zipf.draw(random, (n,)) for _ in range(BATCHES)]
    return Work(ids, random.integers(-8, 9, (n, dim)).astype(np.float32) / 64)


class FloorBytes(NamedTuple):
    """Bytes that a step must move whatever the implementation: N ids, U of them distinct, D columns of float32."""

    ids: float  # 8 N read
    keys: float  # 64 U: the cache line in which each distinct id is found
    rows: float  # 4 D U read in the forward pass
    output: float  # 4 D N written
    gradients: float  # 4 D N read
    update: float  # 2 (4 D + slots) U: rows and slots read and written

    @property
    def total(self) -> float:
        return sum(self)


def floor_bytes(*, n: int, distinct: float, dim: int, payload: int) -> FloorBytes:
    """The bytes of one step; `payload` is bytes of a row with its optimizer slots."""
    wide = 4 * dim
    return FloorBytes(
        ids=8 * n, keys=_LINE * distinct, rows=wide * distinct, output=wide * n, gradients=wide * n,
        update=2 * payload * distinct,
    )  # fmt: skip


class Copy:
    """A copy by `threads` threads at once, each of its own part of a buffer; call it to time it.

    Parts are so large that memcpy writes past the caches, which is its fastest way: the floor is not flattered.
    """

    def __init__(self, threads: int, megabytes_each: int = 256):
        source = np.ones(threads * megabytes_each << 17, np.int64)  # 2^20 bytes are 2^17 numbers
        target = np.empty_like(source)
        self.bytes_moved = 2 * source.nbytes  # read and written
        self._parts = list(zip(np.array_split(target, threads), np.array_split(source, threads)))

    def __call__(self) -> None:
        copies = [threading.Thread(target=np.copyto, args=part) for part in self._parts[1:]]
        for copy in copies:
            copy.start()
        np.copyto(*self._parts[0])
        for copy in copies:
            copy.join()


def available_bytes(meminfo: str | None = None) -> int:
    """Memory that a new process can have."""
    text = pathlib.Path("/proc/meminfo").read_text(encoding="utf-8") if meminfo is None else meminfo
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found.group(1)) if found else 0
