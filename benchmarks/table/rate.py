"""A case of benchmarks.table: ids per second of the native table under row-wise Adagrad with some threads.

It also reports the memory floor, which is the time to copy as many bytes as a step must move. The time of each stage
and the memory of a row beyond its payload follow.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import children, harness
from benchmarks.harness.stage_times import MarkedStep, stage_ms
from benchmarks.table.variants import Native
from benchmarks.table.work import DIM, Copy, all_ids, floor_bytes, make_work
from tf_fusedrec import tf


def main(rows: int, threads: int, repeats: int) -> dict[str, Any]:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    copy = Copy(threads)
    work = make_work(rows)
    variant = Native("rowwise_adagrad", DIM)
    variant.fill(all_ids(rows))
    marked = MarkedStep(variant.plain_step)
    ids, gradients = [tf.constant(batch) for batch in work.ids], tf.constant(work.gradients)
    n, runs, turns = len(work.ids[0]), [], {"plain": 0, "marked": 0}

    def batch(name: str) -> tf.Tensor:
        turns[name] += 1
        return ids[turns[name] % len(ids)]

    times = harness.measure(
        {
            "plain": lambda: variant.step(batch("plain"), gradients),
            "copy": copy,
            "marked": lambda: runs.append(marked.run(batch("marked"), gradients)),
        },
        warmup=5,
        repeats=repeats,
    )
    seconds = times["plain"].median_s
    bandwidth = copy.bytes_moved / times["copy"].median_s
    floor = floor_bytes(n=n, distinct=work.distinct, dim=DIM, payload=variant.payload)
    return {
        "rows": rows,
        "threads": threads,
        "distinct": round(work.distinct),
        "ms": 1e3 * seconds,
        "ms_p90": 1e3 * times["plain"].p90_s,
        "ids_per_s": n / seconds,
        "memcpy_bytes_per_s": bandwidth,
        "ms_floor": 1e3 * floor.total / bandwidth,
        "ratio_vs_memory_floor": floor.total / bandwidth / seconds,
        "bytes_per_row_overhead": variant.overhead,
        "floor_bytes": floor._asdict(),
        "stages_ms": stage_ms(runs[5:]),
    }


if __name__ == "__main__":
    children.answer(main)
