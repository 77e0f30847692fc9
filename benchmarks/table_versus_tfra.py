"""A case of table.py: FusedEmbedding's native table and TFRA's in one process, same ids, same rule, in turns."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import children, harness
from benchmarks.table_contenders import Contender, Native, Tfra
from benchmarks.table_work import DIM, all_ids, available_bytes, make_work
from tf_fusedrec import tf

CHECKED_STEPS = 5
_SLOTS = {"adagrad": 1, "adam": 2}  # of D numbers per row
_SPARE_BYTES = 2 << 30  # TensorFlow, ids, what a step allocates
# Sums of these gradients are exact (table_work.py); what is left are a square root, a division and a few products and
# sums per step, rounded in another order: some units of 2^-24.
TOLERANCE = 1e-5


def main(rows: int, optimizer: str, repeats: int) -> dict[str, Any]:
    """Times of a step of both contenders, or {"skipped": reason}."""
    lacks = _memory_lacks(rows, _SLOTS[optimizer], available_bytes())
    if lacks:
        return {"rows": rows, "optimizer": optimizer, "skipped": lacks}
    tf.get_logger().setLevel("ERROR")  # TFRA warns of an initializer that this run makes no use of
    work = make_work(rows)
    contenders: list[Contender] = [Native(optimizer, DIM), Tfra(optimizer, DIM, capacity=rows)]
    ids, gradients = [tf.constant(batch) for batch in work.ids], tf.constant(work.gradients)
    for contender in contenders:
        contender.fill(all_ids(rows))
    for step in range(CHECKED_STEPS):
        ours, theirs = (contender.step(ids[step], gradients).numpy() for contender in contenders)
        harness.check_close(
            f"rows of {optimizer} after {step} steps against those of TFRA", ours, theirs, relative=TOLERANCE,
            reason="square roots, divisions and sums rounded in another order",
        )  # fmt: skip
    turns = dict.fromkeys((contender.name for contender in contenders), 0)

    def run(contender: Contender) -> None:
        turns[contender.name] += 1
        contender.step(ids[turns[contender.name] % len(ids)], gradients)

    times = harness.measure(
        {c.name: functools.partial(run, c) for c in contenders}, warmup=5, repeats=repeats
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
    """Why both tables cannot be in memory at the same time, or nothing."""
    wanted = Tfra.bytes_wanted(rows, DIM, slots) + Native.bytes_wanted(rows, DIM, slots) + _SPARE_BYTES
    if wanted <= available:
        return ""
    return f"both tables together take {wanted / 1e9:.1f} GB, available are {available / 1e9:.1f} GB"


if __name__ == "__main__":
    children.answer(main)
