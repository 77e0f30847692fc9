"""The variants and the cases of benchmarks.table in TensorFlow. Every case runs in a process of its own.

A variant is one table, with equal rows and the same training step: a layer's forward and backward pass in sequence
form. It takes ids <int64>[N] and gradients <float32>[N, D], returns rows <float32>[N, D], and updates the table.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.synthetic import id_of
from benchmarks.table.work import (
    DIM,
    INITIAL_VALUE,
    LEARNING_RATE,
    Work,
    all_ids,
    floor_bytes,
    make_work,
)
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.tfra.tfra_library import de

_FILL_BATCH = 1 << 18  # rows per call
_tfra_layers = itertools.count()

OPTIMIZERS = {
    "rowwise_adagrad": lambda: optimizers.RowWiseAdagrad(LEARNING_RATE, variant="2d_sp"),
    "rowwise_adagrad_mean": lambda: optimizers.RowWiseAdagrad(LEARNING_RATE, variant="torchrec"),  # FBGEMM's
    "sgd": lambda: optimizers.SGD(LEARNING_RATE),
    "adagrad": lambda: keras.optimizers.legacy.Adagrad(LEARNING_RATE),
    "adam": lambda: keras.optimizers.legacy.Adam(LEARNING_RATE),
}


def after(rows: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the gradients, but not before the rows exist, as in every training step."""
    with tf.control_dependencies([rows]):
        return tf.identity(gradients)


class Variant:
    """A table of D columns under one optimizer."""

    name: str
    layer: keras.layers.Layer

    def __init__(self) -> None:
        # AutoGraph needs seconds to convert TFRA's code, and no variant needs it.
        self.step = tf.function(tf.autograph.experimental.do_not_convert(self.plain_step), autograph=False)

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        """Returns the rows [N, D] of ids [N], and trains the table."""
        raise NotImplementedError

    def fill(self, ids: np.ndarray) -> None:
        """Gives each of these distinct ids a row of INITIAL_VALUE and initial slots."""
        raise NotImplementedError


class Native(Variant):
    """FusedEmbedding over one native table."""

    name = "ours"

    def __init__(self, optimizer: str, dim: int, combiner: str | None = None):
        """With a combiner, the ids are bags <int64>[B, L], and their pooled rows are <float32>[B, D]."""
        initializer = fr.Constant(value=INITIAL_VALUE)
        table = fr.TableConfig(name="rows", dim=dim, optimizer=OPTIMIZERS[optimizer](), initializer=initializer)
        self.layer = fr.FusedEmbedding([table], [fr.FeatureConfig(name="ids", table="rows", combiner=combiner)])
        super().__init__()

    @property
    def table(self) -> fr.tables.NativeTable:
        return self.layer.internals.groups[0].table

    @property
    def payload(self) -> int:
        """Bytes of a row and its slots."""
        record = self.table.record_dtype("rows")
        header = ("last", "count", "updated", "pool")
        return sum(record[name].itemsize for name in record.names or () if name not in header)

    @property
    def overhead(self) -> float:
        """Bytes per row, beyond the payload, that are mapped for keys and rows."""
        memory = self.table.memory
        return (memory["key_bytes"] + memory["row_bytes"]) / memory["rows"] - self.payload

    @staticmethod
    def bytes_wanted(rows: int, dim: int, slots: int) -> int:
        """Returns an upper bound of the memory of `rows` rows with `slots` slots of D numbers each."""
        return rows * (4 * dim * (1 + slots) + 80)

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = self.layer({"ids": ids})["ids"]
        tape.gradient(rows, self.layer.trainable_variables, output_gradients=after(rows, gradients))
        return rows

    def fill(self, ids: np.ndarray) -> None:
        records = self.table.new_records("rows", _FILL_BATCH)
        records["row"] = INITIAL_VALUE
        for begin in range(0, len(ids), _FILL_BATCH):
            part = ids[begin : begin + _FILL_BATCH]
            self.table.restore("rows", "rows", part, records[: len(part)])


class Tfra(Variant):
    """TFRA as its users write it: its Keras layer over a CuckooHashTable, and its optimizer over a legacy Keras one."""

    name = "tfra"

    def __init__(self, optimizer: str, dim: int, capacity: int):
        self._dim = dim
        self.layer = de.keras.layers.Embedding(
            embedding_size=dim, key_dtype=tf.int64, value_dtype=tf.float32, devices=["/CPU:0"],
            initializer=keras.initializers.Constant(INITIAL_VALUE), init_capacity=capacity,
            # Two layers of TFRA must not share a name, which is also the name of the table.
            name=f"rows_{next(_tfra_layers)}",
        )  # fmt: skip
        self._optimizer = de.DynamicEmbeddingOptimizer(OPTIMIZERS[optimizer]())
        # The legacy Adagrad of Keras starts its accumulators at 0.1. Adam's slots start at zero.
        self._starts = {self.layer.params.name: INITIAL_VALUE, "accumulator": 0.1}
        super().__init__()

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = self.layer(ids)
        weights = self.layer.trainable_variables
        slices = tape.gradient(rows, weights, output_gradients=after(rows, gradients))
        self._optimizer.apply_gradients(zip(slices, weights))
        return rows

    def fill(self, ids: np.ndarray) -> None:
        # The trace creates the tables of slots. No step runs.
        self.step.get_concrete_function(
            tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, self._dim], tf.float32)
        )  # fmt: skip
        for variable in (self.layer.params, *self.layer.optimizer_vars):
            start = self._starts.get(variable.name.rsplit("/", 1)[-1], 0.0)
            values = tf.fill([_FILL_BATCH, self._dim], tf.constant(start))
            for begin in range(0, len(ids), _FILL_BATCH):
                part = tf.constant(ids[begin : begin + _FILL_BATCH])
                variable.upsert(part, values[: len(part)])

    @staticmethod
    def bytes_wanted(rows: int, dim: int, slots: int) -> int:
        """Returns the memory of rows and slots, each in a table whose number of buckets of four is a power of two."""
        buckets = 1 << max(0, (-(-rows // 4) - 1)).bit_length()
        return (1 + slots) * 4 * buckets * (4 * dim + 16)


CHECKED_STEPS = 5
_SLOTS = {"adagrad": 1, "adam": 2}  # slots of D numbers per row
_SPARE_BYTES = 2 << 30  # for TensorFlow, the ids and a step
# Sums of these gradients are exact (work.py). A square root, a division and a few products and sums per step remain,
# which are rounded in another order: some units of 2^-24.
TOLERANCE = 1e-5


def in_turn(variant: Variant, work: Work, gradients: tf.Tensor) -> Callable[[], tf.Tensor]:
    """Returns a step of the variant on the batches of the work in turn."""
    batches = itertools.cycle([tf.constant(ids) for ids in work.ids])
    return lambda: variant.step(next(batches), gradients)


def memory_lacks(wanted: int) -> str:
    """Returns the reason why so many bytes do not fit, or ""."""
    available = psutil.virtual_memory().available
    needed = f"{available / 1e9:.1f} GB are available, {wanted / 1e9:.1f} GB are needed"
    return needed if wanted > available else ""


def versus_tfra(rows: int, optimizer: str, repeats: int) -> dict[str, Any]:
    """Our native table and TFRA's in turns, with the same ids and rule. Returns times, or {"skipped": reason}."""
    sizes = [kind.bytes_wanted(rows, DIM, _SLOTS[optimizer]) for kind in (Tfra, Native)]
    if lacks := memory_lacks(sum(sizes) + _SPARE_BYTES):
        return {"rows": rows, "optimizer": optimizer, "skipped": lacks}
    tf.get_logger().setLevel("ERROR")  # TFRA warns of an initializer that this run does not use
    work = make_work(rows)
    variants: list[Variant] = [Native(optimizer, DIM), Tfra(optimizer, DIM, capacity=rows)]
    gradients = tf.constant(work.gradients)
    for variant in variants:
        variant.fill(all_ids(rows))
    for step in range(CHECKED_STEPS):
        ours, theirs = (variant.step(tf.constant(work.ids[step]), gradients).numpy() for variant in variants)
        what = f"rows of {optimizer} after {step} steps against the rows of TFRA"
        harness.check_close(what, ours, theirs, relative=TOLERANCE)
    times = harness.measure({one.name: in_turn(one, work, gradients) for one in variants}, warmup=5, repeats=repeats)
    record: dict[str, Any] = {"rows": rows, "optimizer": optimizer, "distinct": round(work.distinct)}
    for name, timing in times.items():
        record |= {f"ms_{name}": 1e3 * timing.median_s, f"ms_p90_{name}": 1e3 * timing.p90_s}
        record[f"ids_per_s_{name}"] = len(work.ids[0]) / timing.median_s
    return {**record, "ratio": times["tfra"].median_s / times["ours"].median_s}


def rate(rows: int, threads: int, repeats: int) -> dict[str, Any]:
    """Ids per second under row-wise Adagrad, beside the time to copy the bytes that a step must move."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    copy, work, variant = harness.Copy(threads), make_work(rows), Native("rowwise_adagrad", DIM)
    variant.fill(all_ids(rows))
    step = in_turn(variant, work, tf.constant(work.gradients))
    times = harness.measure({"step": step, "copy": copy}, warmup=5, repeats=repeats)
    seconds, bandwidth = times["step"].median_s, copy.bytes_moved / times["copy"].median_s
    floor = floor_bytes(n=len(work.ids[0]), distinct=work.distinct, dim=DIM, payload=variant.payload)
    return {
        "rows": rows, "threads": threads, "distinct": round(work.distinct), "ms": 1e3 * seconds,
        "ms_p90": 1e3 * times["step"].p90_s, "ids_per_s": len(work.ids[0]) / seconds, "memcpy_bytes_per_s": bandwidth,
        "ms_floor": 1e3 * floor / bandwidth, "ratio_vs_memory_floor": floor / bandwidth / seconds,
        "bytes_per_row_overhead": variant.overhead,
    }  # fmt: skip


FIRST_ROWS = 1_000
NEW_IDS = 2_048  # per step


def growth(rows: int, repeats: int) -> dict[str, Any]:
    """The longest pause of a step while the table grows.

    Every step trains the same number of new ids. Growth causes its pauses at the same steps in every repeat, while a
    busy machine does not. So each step counts with its fastest repeat. The pause is the longest such step beyond the
    median. The longest single step is reported too.
    """
    steps = (rows - FIRST_ROWS) // NEW_IDS
    seconds = np.empty([repeats, steps])
    for repeat in range(repeats):
        variant = Native("rowwise_adagrad", DIM)
        seconds[repeat] = _grow(variant, steps)
        payload, size = variant.payload, variant.table.size("rows")
        del variant
        gc.collect()  # frees the table
    copy = harness.Copy(threads=1)
    copy_s = harness.measure({"copy": copy}, warmup=1, repeats=10)["copy"].median_s
    found = {"rows": size, "new_ids_per_step": NEW_IDS, "steps": steps, "repeats": repeats, **pauses(seconds)}
    return {**found, "copy_rows_ms": 1e3 * copy_s * size * payload / (copy.bytes_moved / 2)}


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


def scaling(rows: int, dim: int, repeats: int) -> dict[str, Any]:
    """Nanoseconds per id of lookup and update, with Zipf and with uniform ids, or {"skipped": reason}."""
    # all_ids and the distribution of make_work need up to five numbers of 8 bytes per row.
    wanted = max(Native.bytes_wanted(rows, dim, slots=0) + 8 * rows, 40 * rows) + (3 << 30)
    if lacks := memory_lacks(wanted):
        return {"rows": rows, "dim": dim, "skipped": lacks}
    works = {"zipf": make_work(rows, dim=dim), "uniform": make_work(rows, dim=dim, uniform=True)}
    variant = Native("rowwise_adagrad", dim)
    variant.fill(all_ids(rows))
    gradients = tf.constant(works["zipf"].gradients)
    steps = {name: in_turn(variant, work, gradients) for name, work in works.items()}
    times = harness.measure(steps, warmup=5, repeats=repeats)
    result: dict[str, Any] = {"rows": rows, "dim": dim}
    for name, work in works.items():
        result[f"distinct_{name}"] = round(work.distinct)
        result[f"ns_per_id_{name}"] = 1e9 * times[name].median_s / len(work.ids[0])
    return {**result, "bytes_per_row_overhead": variant.overhead}
