"""Question: how fast is the native table beside TorchRec's managed collisions, by dimension?

    python -m benchmarks.table.collisions --peer PYTHON [--quick] [--json FILE]

The question of MTGRBoost's table 3, without its dense model and on the CPU. A managed collision module maps raw ids
to the rows of a table of fixed size by a binary search in sorted ids. At every INTERVAL-th step it sorts them again,
gives numbers to new ids, and evicts old ones. FBGEMM's CPU table follows it. Ours is FusedEmbedding with one table. A
step looks up ids by zipf(1.05) out of resident rows, takes gradients, and updates by row-wise Adagrad. All ids have a
row before, so neither side evicts, and the rows after INTERVAL steps must agree.

--peer names an interpreter with torch, fbgemm-gpu-cpu, torchrec and psutil.

Fields of the JSON file: `cases` with dim, factor (dim / 32, the "1D" of the paper), rows, ids per step, ms_ours and
ms_peer (mean over the steps of an interval, its median over rounds), ms_peer_between (median step, which is one without
a sort), and ratio = ms_peer / ms_ours. ratio_vs_mch is the smallest.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness
from benchmarks.harness.rounds import Remote
from benchmarks.table.work import all_ids, make_work

DIMS = (32, 256, 2048)
ROWS, IDS = 200_000, 8192
INTERVAL = 8  # steps from one sort of the peer to the next
ROUNDS, QUICK_ROUNDS = 20, 4
TOLERANCE = 1e-4  # FBGEMM sums squares in another order


def compare(python: str, dim: int, turns: int) -> dict[str, Any] | str:
    """Returns one record, or the reason why `python` cannot run the peer."""
    work = make_work(ROWS, n=IDS, dim=dim)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        np.save(folder / "ids.npy", np.stack(work.ids))
        np.save(folder / "gradients.npy", work.gradients)
        np.save(folder / "resident.npy", all_ids(ROWS))
        threads = len(os.sched_getaffinity(0))
        request = {"folder": name, "rows": ROWS, "dim": dim, "interval": INTERVAL, "threads": threads}
        with Remote(python, "benchmarks.table.collisions_peer", request) as theirs:
            if theirs.facts["missing"]:
                return theirs.facts["missing"]
            with Remote(sys.executable, "benchmarks.table.collisions_ours", request) as ours:
                return measure({"ours": ours, "mch": theirs}, folder, dim, turns)


def measure(sides: dict[str, Remote], folder: pathlib.Path, dim: int, turns: int) -> dict[str, Any]:
    for side in sides.values():
        side.ask(do="check")
    rows = [np.load(folder / f"{name}.npy") for name in ("ours", "peer")]
    reason = "sums in another order"
    harness.check_close(f"rows of {dim} columns after training", *rows, relative=TOLERANCE, reason=reason)
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            seconds[name].append(sides[name].ask(do="round", variant=name, steps=INTERVAL))
    ms = {name: 1e3 * float(np.median(np.mean(steps, axis=1))) for name, steps in seconds.items()}
    return {
        "dim": dim,
        "factor": dim // DIMS[0],
        "rows": ROWS,
        "ids": IDS,
        "ms_ours": ms["ours"],
        "ms_peer": ms["mch"],
        "ms_peer_between": 1e3 * float(np.median(seconds["mch"])),
        "ratio": ms["mch"] / ms["ours"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="interpreter with torchrec and fbgemm-gpu-cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE")
    arguments = parser.parse_args(argv)
    cases = []
    for dim in DIMS:
        found = compare(arguments.peer, dim, QUICK_ROUNDS if arguments.quick else ROUNDS)
        if isinstance(found, str):
            sys.exit(f"error: --peer {arguments.peer} lacks a library: {found}. Install it there.")
        cases.append(found)
    fields = {"ratio_vs_mch": min(case["ratio"] for case in cases), "cases": cases}
    harness.print_table("a step of the native table and of managed collisions", cases)
    harness.write_json(arguments.json, {"benchmark": "table.collisions", **fields})


if __name__ == "__main__":
    harness.run(main)
