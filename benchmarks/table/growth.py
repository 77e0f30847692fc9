"""A case of benchmarks.table: the longest pause of a step while the table grows to ten million rows.

Every step trains the same number of new ids. Growth causes its pauses at the same steps in every repeat, while a busy
machine does not. So each step counts with its fastest repeat, and the pause is the longest such step beyond the median.
The longest single step is reported too.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks.harness import children, harness
from benchmarks.harness.synthetic import id_of
from benchmarks.table.variants import Native
from benchmarks.table.work import DIM, Copy
from tf_fusedrec import tf

FIRST_ROWS = 1_000
NEW_IDS = 2_048  # per step


def main(rows: int, repeats: int) -> dict[str, Any]:
    steps = (rows - FIRST_ROWS) // NEW_IDS
    seconds = np.empty([repeats, steps])
    for repeat in range(repeats):
        variant = Native("rowwise_adagrad", DIM)
        seconds[repeat] = _grow(variant, steps)
        payload, size = variant.payload, variant.table.size("rows")
        del variant
        gc.collect()  # frees the table
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


def _grow(variant: Native, steps: int) -> np.ndarray:
    """Returns the seconds of each step."""
    gradients = tf.ones([NEW_IDS, DIM])
    first = id_of(np.arange(FIRST_ROWS))
    variant.fill(first)
    for _ in range(3):
        variant.step(tf.constant(np.resize(first, NEW_IDS)), gradients)
    seconds = np.empty(steps)
    for step in range(steps):
        begin_row = FIRST_ROWS + step * NEW_IDS
        ids = tf.constant(id_of(np.arange(begin_row, begin_row + NEW_IDS)))
        begin = time.perf_counter()
        variant.step(ids, gradients)
        seconds[step] = time.perf_counter() - begin
    return seconds


def pauses(seconds: np.ndarray) -> dict[str, float]:
    """Returns median, pause with its number of rows, and longest step, in ms, from seconds [repeats, steps]."""
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
