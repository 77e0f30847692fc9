"""A case of table.py: does any step have to wait while the table grows from a thousand rows to ten million?

Every step brings the same number of new ids and trains them. A pause that growth causes comes at the same step whenever
the same ids come again, while that of a busy machine does not: growth is repeated, each step counts with its fastest
repeat, and the longest such step beyond the median is the pause. The longest single step is reported beside it.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks import children, harness
from benchmarks.synthetic import id_of
from benchmarks.table_contenders import Native
from benchmarks.table_work import DIM, Copy
from tf_fusedrec import tf

FIRST_ROWS = 1_000
NEW_IDS = 2_048  # of a step


def main(rows: int, repeats: int) -> dict[str, Any]:
    steps = (rows - FIRST_ROWS) // NEW_IDS
    seconds = np.empty([repeats, steps])
    for repeat in range(repeats):
        contender = Native("rowwise_adagrad", DIM)
        seconds[repeat] = _grow(contender, steps)
        payload, size = contender.payload, contender.table.size("rows")
        del contender
        gc.collect()  # gives the table back
    copy = Copy(threads=1)
    copy_s = harness.measure({"copy": copy}, warmup=1, repeats=10)["copy"].median_s
    return {
        "rows": size,
        "new_ids_per_step": NEW_IDS,
        "steps": steps,
        "repeats": repeats,
        **pauses(seconds),
        "copy_rows_ms": 1e3 * copy_s * size * payload / (copy.bytes_moved / 2),
    }


def _grow(contender: Native, steps: int) -> np.ndarray:
    """Seconds of each step."""
    gradients = tf.ones([NEW_IDS, DIM])
    first = id_of(np.arange(FIRST_ROWS))
    contender.fill(first)
    for _ in range(3):
        contender.step(tf.constant(np.resize(first, NEW_IDS)), gradients)
    seconds = np.empty(steps)
    for step in range(steps):
        begin_row = FIRST_ROWS + step * NEW_IDS
        ids = tf.constant(id_of(np.arange(begin_row, begin_row + NEW_IDS)))
        begin = time.perf_counter()
        contender.step(ids, gradients)
        seconds[step] = time.perf_counter() - begin
    return seconds


def pauses(seconds: np.ndarray) -> dict[str, float]:
    """Median, pause (and the rows that there were), longest single step, of seconds [repeats, steps]; times in ms."""
    fastest = seconds.min(axis=0)
    median = float(np.median(fastest))
    return {
        "median_step_ms": 1e3 * median,
        "max_growth_pause_ms": 1e3 * (float(fastest.max()) - median),
        "rows_at_pause": FIRST_ROWS + NEW_IDS * int(fastest.argmax()),
        "longest_single_step_ms": 1e3 * float(seconds.max()),
    }


if __name__ == "__main__":
    children.answer(main)
