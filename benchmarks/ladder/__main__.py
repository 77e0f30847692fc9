"""Question: what do merged tables, deduplication and balanced batches bring, one on top of the other?

    python -m benchmarks.ladder [--quick] [--json FILE]

The command starts two processes (MTGRBoost, figure 13). A GRM with twelve tables trains the same rows in four variants:
  apart          rows and gradients of each table travel alone, all occurrences of ids travel, batches have a fixed
                 number of rows; the ids of all tables share a message in every variant
  merged         tables of equal options share lookup, exchange and update
  deduplicated   a batch's duplicate ids are removed before they travel
  balanced       batches of all ranks have equal cost, tokens and their squares
All variants remove duplicates at the owner, too, the paper's second stage: our probe finds them while it finds rows.
benchmarks.table.dedup shows its share. Lengths are log-normal with mean 600 and at most 3,000 events.

A check comes first: the first three variants train the same batches, so their losses agree at every step. Then the
variants take turns, step by step. A step takes as long as its slowest rank.

Fields: samples_per_s_<variant> (rows of all ranks), ratio_<variant> (over "apart"),
ids_sent_<variant> (share of a step's ids that travels), alltoalls_<variant> (of a step).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.balance.lengths import LONGEST
from benchmarks.harness import harness
from benchmarks.harness.graph_count import count_nodes
from benchmarks.ladder.variants import VARIANTS, Step, make_rows, plan, tensors, train_rows
from tf_fusedrec import tf
from tf_fusedrec.exchange import collectives

RANKS = 2
# Sums of the same gradients in another order, and learning rates that differ by 1e-6 at most.
LOSS_TOLERANCE = 1e-4


def summary(
    seconds: dict[str, np.ndarray], rows: int, ids: dict[str, float], all_to_alls: dict[str, int]
) -> dict[str, float]:
    """Returns the fields of the JSON file.

    Args:
      seconds: <float64>[rounds] by variant, the time to train all rows on the slowest rank.
      rows: Number of rows.
      ids: Share of the ids that travel, by variant.
      all_to_alls: All-to-alls of a step, by variant.
    """
    medians = {name: float(np.median(of)) for name, of in seconds.items()}
    fields: dict[str, float] = {f"samples_per_s_{name}": rows / median for name, median in medians.items()}
    fields |= {f"ratio_{name}": medians["apart"] / median for name, median in medians.items()}
    fields |= {f"ids_sent_{name}": share for name, share in ids.items()}
    return fields | {f"alltoalls_{name}": count for name, count in all_to_alls.items()}


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Returns the fields of the JSON file. All ranks call it."""
    rank, tokens = collectives.rank(), train_rows(count, RANKS)
    rows = make_rows(tokens)
    batches, steps = {}, {}
    for name, variant in VARIANTS.items():
        numbers = plan(tokens, RANKS, variant.balanced)
        every = np.sort(np.concatenate([part for step in numbers for part in step]))
        harness.check_equal(f"rows of {name}", every, np.arange(len(tokens)))
        batches[name] = [tensors(rows.take(step[rank])) for step in numbers]
        steps[name] = Step(variant, LONGEST)
    seconds = {name: np.zeros(rounds) for name in VARIANTS}
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(-1, rounds):
        for at in range(max(map(len, batches.values()))):
            for name in VARIANTS:
                if at < len(batches[name]):
                    taken, loss = _timed(steps[name], batches[name][at])
                    if turn >= 0:
                        seconds[name][turn] += taken
                    else:
                        losses[name].append(loss)
        for name in ("merged", "deduplicated") if turn < 0 else ():
            reason = "sums in another order"
            harness.check_close(
                f"losses, {name}", losses[name], losses["apart"], relative=LOSS_TOLERANCE, reason=reason
            )
    slowest = {name: collectives.all_gather(of[np.newaxis]).max(axis=0) for name, of in seconds.items()}
    ids, all_to_alls = {}, {}
    for name, step in steps.items():
        asked, sent = collectives.all_gather(np.array([step.ids()])).sum(axis=0)
        ids[name] = float(sent / asked)
        all_to_alls[name] = count_nodes(step.function.graph.as_graph_def(), "HorovodAlltoall")
    if not ids["deduplicated"] < ids["merged"] == 1:
        raise harness.CheckFailed(f"The shares of ids that travel are {ids}; without deduplication all must travel.")
    return summary(slowest, len(tokens), ids, all_to_alls)


def _timed(step: Step, batch: dict[str, Any]) -> tuple[float, float]:
    collectives.barrier()
    begin = time.perf_counter()
    loss = step(batch)
    collectives.barrier()
    return time.perf_counter() - begin, loss


def main() -> None:
    arguments = harness.parse_arguments("Merged tables, deduplication and balanced batches, one on top of the other.")
    harness.on_ranks("benchmarks.ladder", RANKS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    fr.init()
    fields = measure(*((4, 1) if arguments.quick else (10, 7)))
    if collectives.rank() == 0:
        harness.print_table("ladder", [{"field": name, "value": value} for name, value in fields.items()])
        harness.write_json(arguments.json, {"benchmark": "ladder", **fields})


if __name__ == "__main__":
    harness.run(main)
