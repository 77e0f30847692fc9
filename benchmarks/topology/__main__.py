"""Question: how do C groups of R ranks change the busiest owner, the memory and the bytes that travel?

    python -m benchmarks.topology [--quick] [--json FILE]

The benchmark repeats Table 1 of 2D-SP for this library. Imbalance is the busiest rank's count over the mean. Peak is
the memory of the fullest rank. First 4 real ranks run as 1, 2 and 4 groups with the rule weight_sync. They report the
ids that a rank receives, its rows, and the bytes that its table has mapped. A count without ranks (counts.py) must
agree. The same count then covers as many ranks as a cluster has. Ids are a Zipf stream.

2D-SP counts seconds of lookups instead of ids, and places whole tables instead of hashed ids. Its figures at C = 1 are
therefore larger.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import children, harness
from benchmarks.topology.counts import REAL_GROUPS, batches, count, counted, imbalance

REAL_RANKS = 4
TIMEOUT_S = 300


def measured(steps: int, ids_per_rank: int) -> list[dict[str, Any]]:
    """Returns the lines of the 4 real ranks, checked against `count`."""
    answers = children.ask_ranks(
        "benchmarks.topology.ranks", REAL_RANKS, timeout_s=TIMEOUT_S, steps=steps, ids_per_rank=ids_per_rank
    )
    sent, lines = batches(REAL_RANKS, steps, ids_per_rank), []
    for groups in REAL_GROUPS:
        want, got = count(sent, groups), answers[str(groups)]
        harness.check_equal(f"ids received, {groups} groups", np.transpose(got["received"]), want.received)
        harness.check_equal(f"rows of each rank, {groups} groups", got["rows"], want.rows)
        megabytes = np.array(got["table_bytes"]) / 1e6
        lines.append(
            {
                "ranks": REAL_RANKS,
                "groups": groups,
                "id_imbalance": imbalance(want.received),
                "row_imbalance": imbalance(want.rows),
                "peak_table_mb": float(megabytes.max()),
                "mean_table_mb": float(megabytes.mean()),
            }
        )
    return lines


def main() -> None:
    arguments = harness.parse_arguments(__doc__.splitlines()[0])
    real = measured(steps=4 if arguments.quick else 24, ids_per_rank=32_768)
    harness.print_table("measured on real ranks, weight_sync: ids that a rank receives, and memory of its table", real)
    ranks, steps = (64, 2) if arguments.quick else (256, 4)
    sent = batches(ranks, steps, ids_per_rank=8_192)
    many = [counted(sent, groups) for groups in (1, 2, 4, 8, 16, ranks)]
    harness.print_table("counted: the same for many ranks, and kilobytes that a rank receives in a step", many)
    harness.write_json(arguments.json, {"measured": real, "counted": many})


if __name__ == "__main__":
    harness.run(main)
