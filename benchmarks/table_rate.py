"""A case of table.py: ids per second of the native table under row-wise Adagrad with a given number of threads.

Beside it what the step moves at least and how long a copy of as many bytes takes (the memory floor), the time of each
stage, and the memory that a row takes beyond its payload.
"""

from __future__ import annotations

from typing import Any

from benchmarks import children, harness
from benchmarks.stage_times import MarkedStep, stage_ms
from benchmarks.table_contenders import Native
from benchmarks.table_work import DIM, Copy, all_ids, floor_bytes, make_work
from tf_fusedrec import tf


def main(rows: int, threads: int, repeats: int) -> dict[str, Any]:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    copy = Copy(threads)
    work = make_work(rows)
    contender = Native("rowwise_adagrad", DIM)
    contender.fill(all_ids(rows))
    marked = MarkedStep(contender.plain_step)
    ids, gradients = [tf.constant(batch) for batch in work.ids], tf.constant(work.gradients)
    n, runs, turns = len(work.ids[0]), [], {"plain": 0, "marked": 0}

    def batch(name: str) -> tf.Tensor:
        turns[name] += 1
        return ids[turns[name] % len(ids)]

    times = harness.measure(
        {
            "plain": lambda: contender.step(batch("plain"), gradients),
            "copy": copy,
            "marked": lambda: runs.append(marked.run(batch("marked"), gradients)),
        },
        warmup=5,
        repeats=repeats,
    )
    seconds = times["plain"].median_s
    bandwidth = copy.bytes_moved / times["copy"].median_s
    floor = floor_bytes(n=n, distinct=work.distinct, dim=DIM, payload=contender.payload)
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
        "bytes_per_row_overhead": contender.overhead,
        "floor_bytes": floor._asdict(),
        "stages_ms": stage_ms(runs[5:]),
    }


if __name__ == "__main__":
    children.answer(main)
