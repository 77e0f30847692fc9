"""A case of benchmarks.table: our native table and TFRA's in turns, in one process, with the same ids and rule."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness import children, harness
from benchmarks.table.variants import Native, Tfra, Variant
from benchmarks.table.work import DIM, all_ids, available_bytes, make_work
from tf_fusedrec import tf

CHECKED_STEPS = 5
_SLOTS = {"adagrad": 1, "adam": 2}  # slots of D numbers per row
_SPARE_BYTES = 2 << 30  # for TensorFlow, the ids and a step
# Sums of these gradients are exact (work.py). A square root, a division and a few products and sums per step remain,
# which are rounded in another order: some units of 2^-24.
TOLERANCE = 1e-5


def main(rows: int, optimizer: str, repeats: int) -> dict[str, Any]:
    """Returns the times of a step of both variants, or {"skipped": reason}."""
    lacks = _memory_lacks(rows, _SLOTS[optimizer], available_bytes())
    if lacks:
        return {"rows": rows, "optimizer": optimizer, "skipped": lacks}
    tf.get_logger().setLevel("ERROR")  # TFRA warns of an initializer that this run does not use
    work = make_work(rows)
    variants: list[Variant] = [Native(optimizer, DIM), Tfra(optimizer, DIM, capacity=rows)]
    ids, gradients = [tf.constant(batch) for batch in work.ids], tf.constant(work.gradients)
    for variant in variants:
        variant.fill(all_ids(rows))
    for step in range(CHECKED_STEPS):
        ours, theirs = (variant.step(ids[step], gradients).numpy() for variant in variants)
        harness.check_close(
            f"rows of {optimizer} after {step} steps against the rows of TFRA", ours, theirs, relative=TOLERANCE,
            reason="square roots, divisions and sums rounded in another order",
        )  # fmt: skip
    turns = dict.fromkeys((variant.name for variant in variants), 0)

    def run(variant: Variant) -> None:
        turns[variant.name] += 1
        variant.step(ids[turns[variant.name] % len(ids)], gradients)

    times = harness.measure(
        {c.name: functools.partial(run, c) for c in variants}, warmup=5, repeats=repeats
    )  # fmt: skip
    ours_s, theirs_s = times["ours"].median_s, times["tfra"].median_s
    return {
        "rows": rows,
        "optimizer": optimizer,
        "distinct": round(work.distinct),
        "ms_ours": 1e3 * ours_s,
        "ms_p90_ours": 1e3 * times["ours"].p90_s,
        "ms_tfra": 1e3 * theirs_s,
        "ms_p90_tfra": 1e3 * times["tfra"].p90_s,
        "ids_per_s_ours": len(work.ids[0]) / ours_s,
        "ids_per_s_tfra": len(work.ids[0]) / theirs_s,
        "ratio": theirs_s / ours_s,
    }


def _memory_lacks(rows: int, slots: int, available: int) -> str:
    """Returns the reason why both tables do not fit in memory, or ""."""
    wanted = Tfra.bytes_wanted(rows, DIM, slots) + Native.bytes_wanted(rows, DIM, slots) + _SPARE_BYTES
    if wanted <= available:
        return ""
    return f"both tables together take {wanted / 1e9:.1f} GB, available are {available / 1e9:.1f} GB"


if __name__ == "__main__":
    children.answer(main)
