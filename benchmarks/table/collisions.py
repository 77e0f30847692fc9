"""Question: how fast is the native table beside TorchRec's managed collisions, by dimension?

    python -m benchmarks.table.collisions --peer PYTHON [--quick] [--json FILE]

The question of MTGRBoost's table 3, without its dense model and on the CPU. A managed collision module maps raw ids
to the rows of a table of fixed size by a binary search in sorted ids. At every INTERVAL-th step it sorts them again,
gives numbers to new ids, and evicts old ones. FBGEMM's CPU table follows it. Ours is FusedEmbedding with one table. A
step looks up ids by zipf(1.05) out of resident rows, takes gradients, and updates by row-wise Adagrad. All ids have a
row before, so neither side evicts, and the rows after INTERVAL steps must agree.

--peer names an interpreter with torch, fbgemm-gpu-cpu and torchrec.

Fields of the JSON file: `cases` with dim, factor (dim / 32, the "1D" of the paper), rows, ids per step, ms_ours and
ms_peer (mean over the steps of an interval, its median over rounds), ms_peer_between (median step, which is one without
a sort), and ratio = ms_peer / ms_ours. ratio_vs_mch is the smallest.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.harness.processes import Remote
from benchmarks.table import peer_torch
from benchmarks.table.peers import TOLERANCE, write_work
from benchmarks.table.work import all_ids, make_work, serve_steps

DIMS = (32, 256, 2048)
ROWS, IDS = 200_000, 8192
INTERVAL = 8  # steps from one sort of the peer to the next
ROUNDS, QUICK_ROUNDS = 20, 4


def ours(folder: str, rows: int, dim: int, interval: int, threads: int) -> None:
    """Our side, in this project's interpreter: a native table under FBGEMM's row-wise Adagrad."""
    from benchmarks.table.cases import Native
    from tf_fusedrec import tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    place, table = pathlib.Path(folder), Native("rowwise_adagrad_mean", dim)
    batches = [tf.constant(ids) for ids in np.load(place / "ids.npy")]
    gradients = tf.constant(np.load(place / "gradients.npy"))
    table.fill(np.load(place / "resident.npy"))
    serve_steps(folder, {"ours": lambda n: table.step(batches[n % len(batches)], gradients)}, interval)


def compare(python: str, dim: int, turns: int) -> dict[str, Any]:
    """Returns one record. Exits if `python` cannot run the peer."""
    with tempfile.TemporaryDirectory() as folder:
        write_work(pathlib.Path(folder), make_work(ROWS, n=IDS, dim=dim), all_ids(ROWS))
        threads = len(os.sched_getaffinity(0))
        request = {"folder": folder, "rows": ROWS, "dim": dim, "interval": INTERVAL, "threads": threads}
        with Remote(python, peer_torch.managed_collisions, **request) as theirs:
            if theirs.facts["missing"]:
                sys.exit(f"error: --peer {python} lacks a library: {theirs.facts['missing']}. Install it there.")
            with Remote(sys.executable, ours, **request) as our_side:
                return measure({"ours": our_side, "mch": theirs}, pathlib.Path(folder), dim, turns)


def measure(sides: dict[str, Remote], folder: pathlib.Path, dim: int, turns: int) -> dict[str, Any]:
    for side in sides.values():
        side.check()
    rows = [np.load(folder / f"{name}.npy") for name in sides]
    harness.check_close(f"rows of {dim} columns after training", *rows, relative=TOLERANCE)
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            seconds[name].append(sides[name].steps(name, INTERVAL))
    ms = {name: 1e3 * float(np.median(np.mean(steps, axis=1))) for name, steps in seconds.items()}
    return {
        "dim": dim, "factor": dim // DIMS[0], "rows": ROWS, "ids": IDS, "ms_ours": ms["ours"], "ms_peer": ms["mch"],
        "ms_peer_between": 1e3 * float(np.median(seconds["mch"])), "ratio": ms["mch"] / ms["ours"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "fewer rounds")
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="interpreter with torchrec and fbgemm-gpu-cpu")
    arguments = parser.parse_args(argv)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    cases = [compare(arguments.peer, dim, rounds) for dim in DIMS]
    harness.print_table("a step of the native table and of managed collisions", cases)
    ratio = min(case["ratio"] for case in cases)
    harness.write_json(arguments.json, {"benchmark": "table.collisions", "ratio_vs_mch": ratio, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
