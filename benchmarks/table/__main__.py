"""Question: how fast is the native table beside TFRA, beside the memory, and while it grows?

    python -m benchmarks.table [--quick] [--json FILE] [--peer PYTHON]

A step takes 81,920 ids by zipf(1.05) out of 1 or 10 million resident rows of 64 columns. It returns their rows [N, D]
in the order of the ids, takes gradients [N, D], and updates the table. Our variant is FusedEmbedding with one table.
TFRA's is its Keras layer over a CuckooHashTable, under its DynamicEmbeddingOptimizer. Rates count ids with duplicates.
Every case runs in a process of its own, with its variants in turns. The results are compared before any timing. A
variant is one table, with equal rows and the same training step.

Fields of the JSON file, each the worst over 1 and 10 million rows (and, for the floor, over 1 and 2 threads):
  ratio_vs_tfra_adagrad, ratio_vs_tfra_adam   time of TFRA's step / time of ours, under the same rule
  ids_per_s_1thread, ids_per_s_2threads       our rate under row-wise Adagrad
  ratio_vs_memory_floor                       time to copy as many bytes as a step must move / time of our step
  bytes_per_row_overhead                      bytes mapped for keys and rows, beyond row and slots
  ratio_vs_fbgemm_sequence, _fbgemm_pooled, _torch_sgd, _torch_adam: with --peer, under the same rule
  ratio_int8_vs_fbgemm, ratio_int4_vs_fbgemm   with --peer, FBGEMM's time for sums of rows of an array in int8 or int4 /
                                              our time for rows of an export in int8, found by their ids; the least
  max_growth_pause_ms, copy_rows_ms           longest step beyond the median while 10 million rows are inserted; the
                                              time to copy these rows
  longest_pause_ms_evicting, longest_pause_ratio_evicting   longest step beyond the median, and 99.9th percentile /
                                              median, of steps that each evict for 2,048 new ids in a table of 12
                                              million rows; the worse of "lru" and "lfu"

--peer names an interpreter with torch, fbgemm-gpu-cpu and torchrec. `collisions` has TorchRec's managed collisions by
dimension, which benchmarks/results/collisions.json has as "cases". `tier` has a table with three rows of four in a
file. benchmarks/results/table.txt is the printed page.
"""

from __future__ import annotations

import abc
import ctypes
import gc
import itertools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # for TFRA

import numpy as np
import psutil

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from benchmarks.harness.harness import ZipfIds, id_of
from benchmarks.table import peers
from benchmarks.table.work import (
    DIM,
    IDS_PER_STEP,
    INITIAL_VALUE,
    LEARNING_RATE,
    ZIPF_ALPHA,
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


class Variant(abc.ABC):
    """A table of D columns under one optimizer."""

    name: str
    layer: keras.layers.Layer

    def __init__(self) -> None:
        # AutoGraph needs seconds to convert TFRA's code, and no variant needs it.
        self.step = tf.function(tf.autograph.experimental.do_not_convert(self.plain_step), autograph=False)

    @abc.abstractmethod
    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        """Returns the rows [N, D] of ids [N], and trains the table."""

    @abc.abstractmethod
    def fill(self, ids: np.ndarray) -> None:
        """Gives each of these distinct ids a row of INITIAL_VALUE and initial slots."""


class Native(Variant):
    name = "ours"

    def __init__(self, optimizer: str, dim: int, combiner: str | None = None, **options: Any):
        """With a combiner, the ids are bags <int64>[B, L], and their pooled rows are <float32>[B, D]."""
        initializer = fr.Constant(value=INITIAL_VALUE)
        table = fr.TableConfig("rows", dim, OPTIMIZERS[optimizer](), initializer, **options)
        self.layer = fr.FusedEmbedding([fr.FeatureConfig(name="ids", table="rows", combiner=combiner)], [table])
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

    def plain_step(self, ids: tf.Tensor, gradients: tf.Tensor, coming: tf.Tensor | None = None) -> tf.Tensor:
        if coming is not None:
            self.layer.prefetch({"ids": coming})
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
    """The longest pause of a step while the table grows, every step by the same number of new ids.

    Growth causes its pauses at the same steps in every repeat, while a busy machine does not. So each step counts with
    its fastest repeat. The pause is the longest such step beyond the median.
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


def evicting(rows: int, eviction: Any, exact: bool, steps: int) -> dict[str, Any]:
    """Steps of a table at max_rows_per_rank, each with the same number of new and of known ids."""
    limits = fr.Limits(rows, eviction, exact_eviction=exact)
    variant, gradients = Native("rowwise_adagrad", DIM, limits=limits), tf.ones([2 * NEW_IDS, DIM])
    for begin in range(0, rows, _FILL_BATCH):  # in lookups of different age
        variant.fill(id_of(np.arange(begin, min(begin + _FILL_BATCH, rows))))
    memory, random, seconds = psutil.Process().memory_info().rss, np.random.default_rng(0), np.empty(steps)
    for step in range(-3, steps):
        end = rows + (step + 3) * NEW_IDS
        ids = id_of(np.append(np.arange(end, end + NEW_IDS), random.integers(end - rows // 2, end, NEW_IDS)))
        begin_s = time.perf_counter()
        variant.step(tf.constant(ids), gradients)
        seconds[max(step, 0)] = time.perf_counter() - begin_s
    size, median = variant.table.size("rows"), float(np.median(seconds))
    if not rows * 15 // 16 - 2 * NEW_IDS <= size <= rows:
        raise RuntimeError(f"a table of max_rows_per_rank {rows} has {size} rows")
    return {
        "rows": rows, "eviction": eviction, "exact": exact, "steps": steps, "median_step_ms": 1e3 * median,
        "p999_step_ms": 1e3 * float(np.percentile(seconds, 99.9)), "longest_step_ms": 1e3 * float(seconds.max()),
        "memory_growth": psutil.Process().memory_info().rss / memory - 1,
    }  # fmt: skip


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


SHARE = 4  # size of a table with a file over its memory
ROW_BYTES = 288  # header 16, row 256, one accumulator, rounded up to 16
STEPS, AHEAD = 8, 2  # steps of a block; batches between a prefetch and its lookup
_MS_SYNC, _MADV_PAGEOUT = 4, 21
_libc = ctypes.CDLL(None, use_errno=True)


def give_up_pages() -> None:
    """Writes back the mapped files of rows and removes their pages from memory. The page cache would hold them all."""
    pages = stayed = 0
    for line in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/fusedrec-rows-" not in line:
            continue
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        for call, flag in ((_libc.msync, _MS_SYNC), (_libc.madvise, _MADV_PAGEOUT)):
            if call(address, size, flag) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise harness.CheckFailed(f"pages of rows stay in memory: {reason}. Use Linux 5.4 or later.")
        present = (ctypes.c_ubyte * ((end - begin) // 4096))()
        _libc.mincore(address, size, present)
        pages, stayed = pages + len(present), stayed + int(np.sum(np.ctypeslib.as_array(present) & 1))
    if not 2 * stayed < pages:
        raise harness.CheckFailed(f"{stayed} of {pages} pages of rows stay in memory. Use a folder on a local disk.")


def tier(rows: int, ids: int, blocks: int) -> dict[str, Any]:
    """Ids per second with three rows of four in a file, with and without look-ahead, and with all rows in memory.

    The variants train on equal batches and take turns by blocks of steps. All rows and tables must be equal, bit by
    bit. The pages of the file leave the memory before every block, which is not timed. The file is in the working
    folder.
    """
    nothing, zipf, random = tf.zeros([0], tf.int64), ZipfIds(rows, ZIPF_ALPHA), np.random.default_rng(0)
    gradients = tf.constant(random.integers(-8, 9, (ids, DIM)).astype(np.float32) / 64)
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
    seconds: dict[str, list[float]] = {"memory": [], "tier": [], "tier_lookahead": []}
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        in_file = fr.Tier(memory_budget_per_rank=rows // SHARE * ROW_BYTES, folder=folder)
        options: dict[str, Any] = {"memory": {}, "tier": {"tier": in_file}, "tier_lookahead": {"tier": in_file}}
        variants = {name: Native("rowwise_adagrad", DIM, **options[name]) for name in seconds}
        steps = {}
        for name, variant in variants.items():
            variant.fill(all_ids(rows))
            arguments = signature if name != "tier_lookahead" else [*signature, signature[0]]
            steps[name] = tf.function(variant.plain_step, input_signature=arguments, autograph=False)

        def train(name: str, block: list[tf.Tensor]) -> list[tf.Tensor]:
            if name != "tier_lookahead":
                return [steps[name](batch, gradients) for batch in block]
            return [
                steps[name](*both) for both in zip(block, [gradients] * STEPS, [*block[AHEAD:], *[nothing] * AHEAD])
            ]

        drawn = [[tf.constant(zipf.draw(random, (ids,))) for _ in range(STEPS)] for _ in range(1 + blocks)]
        found = {name: train(name, drawn[0]) for name in variants}
        tables = {name: variant.table.snapshot("rows") for name, variant in variants.items()}
        for name in ("tier", "tier_lookahead"):
            harness.check_equal(f"rows of {name}", found[name], found["memory"])
            harness.check_equal(f"ids of {name}", tables[name][0], tables["memory"][0])
            for field in set(tables[name][1].dtype.names) - {"pool"}:  # the place of a row in memory
                harness.check_equal(f"{field} of {name}", tables[name][1][field], tables["memory"][1][field])
            memory = variants[name].table.memory
            if memory["second_rows"] < (SHARE - 1) * memory["rows"]:
                raise harness.CheckFailed(f"{name} has {memory}; {SHARE - 1} of {SHARE} rows must be in its file.")
        for number, name in harness.in_turns(list(variants), blocks):
            give_up_pages()
            begin = time.perf_counter()
            train(name, drawn[1 + number])
            seconds[name].append(time.perf_counter() - begin)
    rates = {f"ids_per_s_{name}": STEPS * ids / harness.timing(taken).median_s for name, taken in seconds.items()}
    return {
        "rows": rows, "ids": ids, **rates, "ratio": rates["ids_per_s_tier_lookahead"] / rates["ids_per_s_memory"],
        "ratio_lookahead": rates["ids_per_s_tier_lookahead"] / rates["ids_per_s_tier"],
    }  # fmt: skip


ROWS = (10**6, 10**7)
THREADS = (1, 2)
SCALING_QUICK = [(10**4, 4), (10**5, 4), (10**6, 4), (10**7, 4)]
SCALING = [*SCALING_QUICK, (10**8, 4), (10**4, DIM), (10**5, DIM), (10**6, DIM), (10**7, DIM)]


def show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Prints measured records as a table, and a line with the reason for each skipped record."""
    harness.print_table(title, [record for record in records if "skipped" not in record])
    for record in records:
        if "skipped" in record:
            case = ", ".join(f"{name} {value}" for name, value in record.items() if name != "skipped")
            print(f"  skipped: {case}: {record['skipped']}", flush=True)


def summary(
    versus: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]], growth: Mapping[str, Any],
    evictions: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] = (),
    quantized: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    fields: dict[str, Any] = {}
    for rule in ("adagrad", "adam"):
        fields[f"ratio_vs_tfra_{rule}"] = min(c["ratio"] for c in versus if c["optimizer"] == rule and "ratio" in c)
    for threads in THREADS:
        name = f"ids_per_s_{threads}thread" + "s" * (threads > 1)
        fields[name] = min(rate["ids_per_s"] for rate in rates if rate["threads"] == threads)
    for peer in against:
        name = f"ratio_vs_{peer['peer']}"
        fields[name] = min(fields.get(name, peer["ratio"]), peer["ratio"])
    for case in quantized:
        name = f"ratio_{case['peer_rows']}_vs_fbgemm"
        fields[name] = min(fields.get(name, case["ratio"]), case["ratio"])
    fields["ratio_vs_memory_floor"] = min(rate["ratio_vs_memory_floor"] for rate in rates)
    fields["bytes_per_row_overhead"] = max(rate["bytes_per_row_overhead"] for rate in rates)
    by_default = [case for case in evictions if not case["exact"]]
    return fields | {name: growth[name] for name in ("max_growth_pause_ms", "copy_rows_ms")} | {
        "longest_pause_ms_evicting": max(c["longest_step_ms"] - c["median_step_ms"] for c in by_default),
        "longest_pause_ratio_evicting": max(c["p999_step_ms"] / c["median_step_ms"] for c in by_default),
    }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch, fbgemm-gpu-cpu and torchrec")
    arguments = parser.parse_args()
    repeats, results = 20 if arguments.quick else 60, dict[str, Any]()
    print(f"table: {IDS_PER_STEP} ids per step, zipf({ZIPF_ALPHA}), {DIM} columns unless said")
    print(f"on: {harness.describe_machine()}")
    if arguments.peer:
        results["peers"] = [
            record for threads in THREADS
            for record in peers.compare(arguments.peer, rows=ROWS[0], threads=threads, repeats=repeats // 4)
        ]  # fmt: skip
        show("against FBGEMM (CPU) and torch, the same rule and form of answer", results["peers"])
        results["collisions"] = [
            peers.collisions(arguments.peer, dim, rounds=repeats // 4) for dim in peers.COLLISION_DIMS
        ]
        show("against TorchRec's managed collisions and FBGEMM's table (CPU)", results["collisions"])
        results["quantized"] = [
            record for dim in peers.QUANTIZED_DIMS for dtype in peers.ROUNDING for ops in ("stock", "ours")
            for record in peers.quantized(arguments.peer, dtype, dim, ops, rows=ROWS[0], repeats=repeats)
        ]  # fmt: skip
        show("served rows in int8, found by id, against FBGEMM's array (CPU), 1 thread", results["quantized"])
    results["versus_tfra"] = [
        processes.ask(versus_tfra, rows=rows, optimizer=optimizer, repeats=repeats)
        for rows in ROWS for optimizer in ("adagrad", "adam")
    ]  # fmt: skip
    show("against TFRA, the same rule, all cores", results["versus_tfra"])
    results["rates"] = [
        processes.ask(rate, rows=rows, threads=threads, repeats=2 * repeats)
        for rows in ROWS for threads in THREADS
    ]  # fmt: skip
    show("ours, row-wise Adagrad, by threads", results["rates"])
    results["growth"] = processes.ask(growth, rows=ROWS[-1], repeats=3)
    show("longest pause of a step while the table grows", [results["growth"]])
    rows, steps = (10**6, 300) if arguments.quick else (12 * 10**6, 3_000)
    policies = [("lru", False), ("lfu", False), ("lru", True)]
    results["evicting"] = [processes.ask(evicting, rows=rows, eviction=e, exact=x, steps=steps) for e, x in policies]
    show("steps that evict", results["evicting"])
    sizes = SCALING_QUICK if arguments.quick else SCALING
    results["scaling"] = [processes.ask(scaling, rows=rows, dim=dim, repeats=repeats) for rows, dim in sizes]
    show("time per id by rows resident, row-wise Adagrad, all cores", results["scaling"])
    rows, ids, blocks = (10**5, 4096, 4) if arguments.quick else (10**6, 8192, 12)
    results["tier"] = processes.ask(tier, rows=rows, ids=ids, blocks=blocks)
    show("three rows of four in a file, with and without look-ahead", [results["tier"]])
    peers_ratios = results.get("peers", [])
    fields = summary(
        results["versus_tfra"], results["rates"], results["growth"], results["evicting"], peers_ratios,
        results.get("quantized", []),
    )  # fmt: skip
    harness.print_fields("fields", fields)
    harness.write_json(arguments.json, {**fields, **results})


if __name__ == "__main__":
    processes.program(main)
