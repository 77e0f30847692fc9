"""Native tables beside FBGEMM's CPU tables and torch's sparse embedding, in two interpreters that take turns.

The peers' tables are static, with row numbers 0 .. rows - 1 as ids. Here a row number is the place of the id among all
ids in ascending order, so that frequent rows are not neighbours.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.processes import Remote
from benchmarks.table import peer_torch
from benchmarks.table.work import DIM, Work, all_ids, make_work, serve_steps

BAG = 10  # ids pooled into one row, where rows are pooled
# By peer, our variant with the same rule and the same form of output: its optimizer, pooling and the rule in words.
PAIRS = {
    "fbgemm_sequence": ("sequence", "rowwise_adagrad_mean", "row-wise Adagrad, a row per id"),
    "fbgemm_pooled": ("pooled", "rowwise_adagrad_mean", f"row-wise Adagrad, sums of {BAG} rows"),
    "torch_sgd": ("sgd", "sgd", "SGD, a row per id"), "torch_adam": ("adam", "adam", "Adam, a row per id"),
}  # fmt: skip
# Sums of gradients are exact (work.py). FBGEMM sums squares in another order, and torch adds gradients one by one.
TOLERANCE = 1e-4


def ours(folder: str, rows: int, threads: int, bag: int) -> None:
    """Our side, in this project's interpreter."""
    from benchmarks.table.cases import Native
    from tf_fusedrec import tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    batches = [tf.constant(ids) for ids in np.load(pathlib.Path(folder) / "ids.npy")]
    gradients = tf.constant(np.load(pathlib.Path(folder) / "gradients.npy"))
    variants, resident = {}, all_ids(rows)
    for name, optimizer, _ in PAIRS.values():
        pooled = name == "pooled"
        table = Native(optimizer, DIM, "sum" if pooled else None)
        table.fill(resident)
        inputs = [tf.reshape(ids, [-1, bag]) for ids in batches] if pooled else batches
        variants[name] = (table, inputs, gradients[: len(inputs[0])])

    def step(name: str, n: int) -> tf.Tensor:
        table, inputs, of_rows = variants[name]
        return table.step(inputs[n % len(inputs)], of_rows)

    serve_steps(folder, {name: functools.partial(step, name) for name in variants}, 4)


def write_work(folder: pathlib.Path, work: Work, resident: np.ndarray) -> None:
    """Writes ids.npy <int64>[BATCHES, N], numbers.npy (their row numbers), gradients.npy and resident.npy."""
    ascending = np.sort(resident)
    numbers = np.searchsorted(ascending, work.ids)
    harness.check_equal("ids of the row numbers that the peers get", ascending[numbers], work.ids)
    arrays = {"ids": np.stack(work.ids), "numbers": numbers.astype(np.int64), "gradients": work.gradients}
    for name, array in {**arrays, "resident": resident}.items():
        np.save(folder / f"{name}.npy", array)


def compare(python: str, *, rows: int, threads: int, repeats: int) -> list[dict[str, Any]] | str:
    """Returns one record per peer, or the reason why `python` cannot run the peers."""
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(rows)
        write_work(pathlib.Path(folder), work, all_ids(rows))
        request = {"folder": folder, "rows": rows, "threads": threads, "bag": BAG}
        with Remote(python, peer_torch.tables, **request) as theirs:
            if theirs.facts["missing"]:
                return theirs.facts["missing"]
            with Remote(sys.executable, ours, **request) as our_side:
                medians = _medians(theirs, our_side, pathlib.Path(folder), repeats)
    n = len(work.ids[0])
    return [
        {
            "peer": peer, "rule": rule, "rows": rows, "threads": threads, "ms_ours": 1e3 * medians[mine],
            "ms_peer": 1e3 * medians[peer], "ids_per_s_ours": n / medians[mine], "ids_per_s_peer": n / medians[peer],
            "ratio": medians[peer] / medians[mine],
        }
        for peer, (mine, _, rule) in PAIRS.items()
    ]  # fmt: skip


def _medians(theirs: Remote, our_side: Remote, folder: pathlib.Path, repeats: int) -> dict[str, float]:
    """Compares the rows of both sides, then returns the median seconds of each peer and each variant of ours."""
    theirs.check(), our_side.check()
    for peer, (mine, *_) in PAIRS.items():
        rows = (np.load(folder / f"{name}.npy") for name in (mine, peer))
        harness.check_close(f"rows against the rows of {peer}", *rows, relative=TOLERANCE)
    seconds: dict[str, list[float]] = {name: [] for peer, (mine, *_) in PAIRS.items() for name in (peer, mine)}
    for repeat in range(-1, repeats):
        for peer, (mine, *_) in PAIRS.items():
            for side, name in [(theirs, peer), (our_side, mine)][:: 1 if repeat % 2 else -1]:
                taken = side.steps(name, 2)
                seconds[name] += taken if repeat >= 0 else []
    return {name: harness.timing(values).median_s for name, values in seconds.items()}
