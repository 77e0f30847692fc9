"""Native tables beside FBGEMM's CPU tables and torch's sparse embedding, in two interpreters that take turns.

The peers' tables are static, with row numbers 0 .. rows - 1 as ids. Here a row number is the place of the id among all
ids in ascending order, so that frequent rows are not neighbours.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.rounds import Remote
from benchmarks.table.work import Work, all_ids, make_work

BAG = 10  # ids pooled into one row, where rows are pooled
# Our variant with the same rule and the same form of output, by peer.
PAIRS = {"fbgemm_sequence": "sequence", "fbgemm_pooled": "pooled", "torch_sgd": "sgd", "torch_adam": "adam"}
_RULES = {
    "sequence": "row-wise Adagrad, a row per id", "pooled": f"row-wise Adagrad, sums of {BAG} rows",
    "sgd": "SGD, a row per id", "adam": "Adam, a row per id",
}  # fmt: skip
# Sums of gradients are exact (work.py). FBGEMM sums squares in another order, and torch adds gradients one by one.
TOLERANCE = 1e-4


def compare(python: str, *, rows: int, threads: int, repeats: int) -> list[dict[str, Any]] | str:
    """Returns one record per peer, or the reason why `python` cannot run the peers."""
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(rows)
        write_work(pathlib.Path(folder), work, all_ids(rows))
        request = {"folder": folder, "rows": rows, "threads": threads, "bag": BAG}
        with Remote(python, "benchmarks.table.peer_torch", request) as theirs:
            if theirs.facts["missing"]:
                return theirs.facts["missing"]
            with Remote(sys.executable, "benchmarks.table.peer_ours", request) as ours:
                return _compare(theirs, ours, pathlib.Path(folder), rows, threads, repeats, len(work.ids[0]))


def write_work(folder: pathlib.Path, work: Work, resident: np.ndarray) -> None:
    """Writes ids.npy <int64>[BATCHES, N], numbers.npy (the row numbers of these ids) and gradients.npy."""
    ascending = np.sort(resident)
    numbers = np.searchsorted(ascending, work.ids)
    harness.check_equal("ids of the row numbers that the peers get", ascending[numbers], work.ids)
    np.save(folder / "ids.npy", np.stack(work.ids))
    np.save(folder / "numbers.npy", numbers.astype(np.int64))
    np.save(folder / "gradients.npy", work.gradients)


def _compare(
    theirs: Remote, ours: Remote, folder: pathlib.Path, rows: int, threads: int, repeats: int, n: int
) -> list[dict[str, Any]]:
    for side in (theirs, ours):
        side.ask(do="check")
    for peer, mine in PAIRS.items():
        harness.check_close(
            f"rows after 3 steps against the rows of {peer}",
            np.load(folder / f"{mine}.npy"),
            np.load(folder / f"{peer}.npy"),
            relative=TOLERANCE,
            reason="sums in another order",
        )
    seconds: dict[str, list[float]] = {name: [] for pair in PAIRS.items() for name in pair}
    for repeat in range(-1, repeats):
        for peer, mine in PAIRS.items():
            turns = [(theirs, peer), (ours, mine)]
            for side, name in turns if repeat % 2 else turns[::-1]:
                taken = side.ask(do="round", variant=name, steps=2)
                if repeat >= 0:
                    seconds[name] += taken
    medians = {name: harness.timing(values).median_s for name, values in seconds.items()}
    return [
        {
            "peer": peer,
            "rule": _RULES[mine],
            "rows": rows,
            "threads": threads,
            "ms_ours": 1e3 * medians[mine],
            "ms_peer": 1e3 * medians[peer],
            "ids_per_s_ours": n / medians[mine],
            "ids_per_s_peer": n / medians[peer],
            "ratio": medians[peer] / medians[mine],
        }
        for peer, mine in PAIRS.items()
    ]
