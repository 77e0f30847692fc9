"""One step's work on a table: ids, gradients, and the bytes that any implementation must move. Needs NumPy only."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import processes
from benchmarks.harness.harness import ZipfIds, id_of

IDS_PER_STEP = 81_920
DIM = 64
ZIPF_ALPHA = 1.05
INITIAL_VALUE = 0.05
LEARNING_RATE = 0.05
BATCHES = 16  # different batches, used in turn
BAG = 10  # ids pooled into one row, where rows are pooled
QUANTIZED_BAGS = (1, 20)  # the same for rows of a server
INTERVAL = 8  # steps from one sort of TorchRec's managed collisions to the next
_LINE = 64  # bytes of a cache line


def random_rows(rows: int, dim: int) -> np.ndarray:
    """Returns rows <float32>[rows, dim] of all ids in ascending order, which a server rounds to 8 or 4 bits."""
    return np.random.default_rng(2).uniform(-INITIAL_VALUE, INITIAL_VALUE, (rows, dim)).astype(np.float32)


class Work(NamedTuple):
    """Batches of ids of resident rows, and the gradients of these rows."""

    ids: list[np.ndarray]  # BATCHES arrays <int64>[N]
    gradients: np.ndarray  # <float32>[N, D]

    @property
    def distinct(self) -> float:
        """Mean number of distinct ids of a batch."""
        return float(np.mean([len(np.unique(ids)) for ids in self.ids]))


def all_ids(rows: int) -> np.ndarray:
    """Returns <int64>[rows], all ids of `make_work`, shuffled so that frequent ids are not neighbours in memory."""
    return id_of(np.random.default_rng(1).permutation(rows))


def make_work(rows: int, *, n: int = IDS_PER_STEP, dim: int = DIM, uniform: bool = False) -> Work:
    """Returns batches of n ids out of `rows`, by zipf(1.05) or uniform.

    Gradients are small integers over 64. Their sums are exact in any order, so that results compare closely.
    """
    random = np.random.default_rng(0)
    if uniform:
        ids = [id_of(random.integers(0, rows, n)) for _ in range(BATCHES)]
    else:
        zipf = ZipfIds(rows, ZIPF_ALPHA)
        ids = [zipf.draw(random, (n,)) for _ in range(BATCHES)]
    return Work(ids, random.integers(-8, 9, (n, dim)).astype(np.float32) / 64)


def floor_bytes(*, n: int, distinct: float, dim: int, payload: int) -> float:
    """Returns the bytes that any implementation of a step moves, with N ids, U of them distinct, and D float32 columns.

    `payload` has the bytes of a row with its optimizer slots. The parts: 8 N bytes of ids read; a cache line for each
    distinct id; 4 D U bytes of rows read forward; 4 D N written; 4 D N of gradients read; rows with slots updated.
    """
    return 8 * n + _LINE * distinct + 4 * dim * distinct + 2 * 4 * dim * n + 2 * payload * distinct


def serve_steps(folder: str, variants: Mapping[str, Callable[[int], Any]], checked: int, **facts: Any) -> None:
    """Serves steps that return rows. Its check saves the rows after `checked` steps of each as FOLDER/<name>.npy."""

    def check() -> None:
        for name, step in variants.items():
            rows = [step(n) for n in range(checked)][-1]
            np.save(pathlib.Path(folder) / f"{name}.npy", np.asarray(rows))

    processes.serve(variants, check, {"missing": "", **facts})
