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
from typing import Any

import numpy as np

from benchmarks.harness import harness, processes
from benchmarks.table import peer_torch, peers
from benchmarks.table.work import INTERVAL, make_work

DIMS = (32, 256, 2048)
ROWS, IDS = 200_000, 8192
ROUNDS, QUICK_ROUNDS = 20, 4


def compare(python: str, dim: int, rounds: int) -> dict[str, Any]:
    """Returns one record."""
    work, pairs = make_work(ROWS, n=IDS, dim=dim), {"mch": ("ours", "rowwise_adagrad_mean", 0)}
    ms = peers.turns(
        python, peer_torch.managed_collisions, work, ROWS, pairs, steps=INTERVAL, repeats=rounds,
        threads=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    of_interval = {name: float(np.median(taken.mean(axis=1))) for name, taken in ms.items()}
    return {
        "dim": dim, "factor": dim // DIMS[0], "rows": ROWS, "ids": IDS, "ms_ours": of_interval["ours"],
        "ms_peer": of_interval["mch"], "ms_peer_between": float(np.median(ms["mch"])),
        "ratio": of_interval["mch"] / of_interval["ours"],
    }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__, "fewer rounds")
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="interpreter with torchrec and fbgemm-gpu-cpu")
    arguments = parser.parse_args()
    cases = [compare(arguments.peer, dim, QUICK_ROUNDS if arguments.quick else ROUNDS) for dim in DIMS]
    harness.print_table("a step of the native table and of managed collisions", cases)
    ratio = min(case["ratio"] for case in cases)
    harness.write_json(arguments.json, {"benchmark": "table.collisions", "ratio_vs_mch": ratio, "cases": cases})


if __name__ == "__main__":
    processes.program(main)
