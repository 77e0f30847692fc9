"""A case of benchmarks.table: nanoseconds per id of lookup and update by the number of resident rows."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness import children, harness
from benchmarks.table.variants import Native
from benchmarks.table.work import all_ids, available_bytes, make_work
from tf_fusedrec import tf

_SPARE_BYTES = 3 << 30


def main(rows: int, dim: int, repeats: int) -> dict[str, Any]:
    """Returns the time per id with Zipf ids and with uniform ids, or {"skipped": reason}."""
    # all_ids and the distribution of make_work need up to five numbers of 8 bytes per row.
    wanted = max(Native.bytes_wanted(rows, dim, slots=0) + 8 * rows, 40 * rows) + _SPARE_BYTES
    available = available_bytes()
    if wanted > available:
        reason = f"{available / 1e9:.1f} GB are available, {wanted / 1e9:.1f} GB are needed"
        return {"rows": rows, "dim": dim, "skipped": reason}
    works = {"zipf": make_work(rows, dim=dim), "uniform": make_work(rows, dim=dim, uniform=True)}
    variant = Native("rowwise_adagrad", dim)
    variant.fill(all_ids(rows))
    batches = {name: [tf.constant(batch) for batch in work.ids] for name, work in works.items()}
    gradients = tf.constant(works["zipf"].gradients)
    turns = dict.fromkeys(works, 0)

    def run(name: str) -> None:
        turns[name] += 1
        variant.step(batches[name][turns[name] % len(batches[name])], gradients)

    times = harness.measure(
        {name: functools.partial(run, name) for name in works}, warmup=5, repeats=repeats
    )  # fmt: skip
    result: dict[str, Any] = {"rows": rows, "dim": dim}
    for name, work in works.items():
        result[f"distinct_{name}"] = round(work.distinct)
        result[f"ns_per_id_{name}"] = 1e9 * times[name].median_s / len(work.ids[0])
    return {**result, "bytes_per_row_overhead": variant.overhead}


if __name__ == "__main__":
    children.answer(main)
