"""The steps of tests.gpu.tensorflow_session: python -m tests.gpu.tensorflow_steps NAME [--device /GPU:0].

Every step takes the device, so that tests run the same code on /CPU:0. Its reference is the CPU. A step raises
AssertionError on a difference, prints what it found, and exits with 77 where the device cannot show what it looks for.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # two ranks share a device
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # placements are logged

import numpy as np

import tf_fusedrec as fr
from tests.golden import tables
from tests.gpu.steps import LEFT_OUT_CODE, ROOT
from tests.gpu.tensorflow_programs import CPU, DIM, batches, layer, records_of, step_of
from tf_fusedrec import keras, ops, tf
from tf_fusedrec.schedules import DualBuffer

IDS = {"FuseIds", "SegmentUnique", "RankPartition"}  # ops of ids on their way to the owner


class LeftOut(Exception):
    """The device cannot show what the step looks for."""


@contextmanager
def standard_error() -> Iterator[list[str]]:
    """Collects what C++ writes to standard error, in one text at the end."""
    kept, texts = os.dup(2), list[str]()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))


def placement(device: str) -> None:
    """Table, lookup and update lie on the device, without a tf.device inside the step. Ids of host_rows do not."""
    kind = tf.DeviceSpec.from_string(device).device_type
    on_device = {"HashTable", "TableLookup", "TableApplyGradients", "PooledRecover", "PooledRecoverGrad"}
    for place, of_place, of_ids in (("device", set(), kind), ("host_rows", {"TableLookAhead"}, "CPU")):
        with standard_error() as texts:
            tf.debugging.set_log_device_placement(True)
            embedding = layer(device, f"placed_{place}", {"tier": fr.Tier(host_rows=place == "host_rows")})
            step_of(embedding, device)(*list(batches(0))[1])
        placed = set(re.findall(r"\(Fusedrec>(\w+)\): \S*device:(\w+):", texts[0]))
        placed |= set(re.findall(r"Executing op Fusedrec>(\w+) in device \S*device:(\w+):", texts[0]))
        found = embedding.internals.groups[0].table.place.name
        assert found == {"GPU": place, "CPU": "CPU"}[kind], found
        assert on_device | (of_place if kind == "GPU" else set()) | IDS <= {op for op, _ in placed}, "the log lacks ops"
        assert {where for op, where in placed if op not in IDS} == {kind}, "ops lie elsewhere"
        assert {where for op, where in placed if op in IDS} == {of_ids}, "ids travel elsewhere"
        print(f"placed: {sorted(placed)}")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # TensorFlow goes on logging until the process ends


def memory(device: str) -> None:
    """A table's memory is TensorFlow's: it counts there, and comes back. No memory is a Status; training goes on."""
    on_gpu, limit = tf.DeviceSpec.from_string(device).device_type == "GPU", 1 << 30
    if on_gpu:
        gpu = tf.config.list_physical_devices("GPU")[0]
        limits = [tf.config.LogicalDeviceConfiguration(memory_limit=limit >> 20)]
        tf.config.set_logical_device_configuration(gpu, limits)

    def used() -> int:
        return tf.config.experimental.get_memory_info(device.lstrip("/"))["current"] if on_gpu else 0

    before, embedding = used(), layer(device, "memory")
    step, known = step_of(embedding, device), tf.range(1000, dtype=tf.int64)
    step(known, known[:, tf.newaxis])
    table = embedding.internals.groups[0].table
    counted = table.memory["row_bytes"] + table.memory["key_bytes"]
    print(f"1000 rows: {used() - before} bytes of TensorFlow's allocator, {counted} bytes of keys and rows")
    if on_gpu:
        assert used() - before >= counted > 0, "the table has memory that is not of TensorFlow's allocator"
        print(f"refused: {_fill(embedding, device, limit)}")
        step(known, known[:, tf.newaxis])
    assert np.all(np.isfinite(records_of(embedding)[1]["row"]))
    ops.table_destroy(table._handle)
    if not on_gpu:
        raise LeftOut("TensorFlow counts and limits the memory of a GPU alone")
    print(f"{used() - before} bytes are left when the table is freed")
    assert used() - before < limit // 8


def _fill(embedding: Any, device: str, limit: int) -> str:
    """Adds rows until the device has no memory. Returns the first line of the error."""
    row_bytes, n = 4 * 3 * DIM, 1 << 19
    for begin in range(0, 2 * limit // row_bytes, n):
        try:
            with tf.device(device):
                embedding({"item": tf.range(begin, begin + n, dtype=tf.int64)}, training=True)
        except tf.errors.ResourceExhaustedError as error:
            return f"beyond {begin} rows: {str(error).splitlines()[0]}"
    raise AssertionError("the table is larger than the memory of the device")


def bits(device: str) -> None:
    """Rows, and tables behind every step, have the bits of the CPU: plain, evicting, 16-bit, mixed, in host memory.

    So have the random programs of tests/golden, by ops alone.
    """
    for number, table in enumerate((
        {},
        {"limits": fr.Limits(max_rows_per_rank=180, eviction="lru"), "record_tombstones": True},
        {"limits": fr.Limits(ttl=4), "storage": fr.Storage(dtype="bfloat16", stochastic_rounding=True)},
        {"storage": fr.Storage(dtype="mixed", hot_after=2), "limits": fr.Limits(admission_count=2)},
        {"tier": fr.Tier(host_rows=True)},
        {
            "tier": fr.Tier(host_rows=True, hot_rows_per_rank=40),
            "limits": fr.Limits(180, "lru"), "record_tombstones": True,
        },
    )):  # fmt: skip
        sides = [layer(where, f"bits{number}{side}", table) for side, where in enumerate((CPU, device))]
        steps = [step_of(embedding, where) for embedding, where in zip(sides, (CPU, device))]
        for batch in batches(number):
            answers = [[rows.numpy() for rows in step(*batch)] for step in steps]
            for ours, wanted in zip(answers[1], answers[0]):
                np.testing.assert_array_equal(ours, wanted)
            for ours, wanted in zip(*[records_of(embedding) for embedding in reversed(sides)]):
                np.testing.assert_array_equal(ours, wanted)
        print(f"equal bits: {table}")
    every = range(0, tables.ON_HOST, 5)  # all rules and storages
    differing = tables.differing(every, lambda number: tables.run_on_host(number, device=device))
    assert not differing, f"programs of tests/golden/tables.py with other bits: {differing}"
    print(f"equal bits: {len(every)} programs")


def streams(device: str) -> None:
    """Ops of a table read what TensorFlow's kernels have just written, and these read what the table has: 200 times."""

    def program(where: str, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
        embedding = layer(where, name)

        @tf.function(autograph=False)
        def many(start: Any) -> Any:
            def body(n: Any, ids: Any, total: Any) -> Any:
                big = tf.linalg.matmul(tf.ones([512, 512]), tf.ones([512, 512]))  # work that is behind the host
                ids = (ids * 31 + 7 + tf.cast(big[0, 0], tf.int64)) % 97
                with tf.GradientTape() as tape:
                    rows = embedding({"item": ids})["item"]
                    loss = tf.reduce_sum(rows * tf.cast(tf.bitwise.bitwise_and(ids, 3), tf.float32)[:, tf.newaxis])
                tape.gradient(loss, embedding.trainable_variables)
                return n + 1, ids, total + tf.cast(tf.round(rows * 1024), tf.int64)

            zeros = tf.zeros([tf.size(start), DIM], tf.int64)
            shapes = [tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape([None, DIM])]
            return tf.while_loop(lambda n, *_: n < 200, body, [0, start, zeros], shapes, parallel_iterations=10)[2]

        with tf.device(where):
            total = many(tf.range(50, dtype=tf.int64)).numpy()
        return total, records_of(embedding)

    wanted, ours = program(CPU, "on_cpu"), program(device, "on_device")
    np.testing.assert_array_equal(ours[0], wanted[0])
    for mine, theirs in zip(ours[1], wanted[1]):
        np.testing.assert_array_equal(mine, theirs)
    print("200 lookups and updates behind TensorFlow's own kernels: equal")


def model(device: str) -> None:
    """A GRM with its tables on the device, or with host_rows, learns as it does with tables on the CPU."""
    from tests.models.batches import of_any_size, ranking_batch
    from tf_fusedrec.models.build import make_embedding, make_model
    from tf_fusedrec.models.experiment import load

    def run(host_rows: bool) -> Any:
        tables = f"embedding.all_tables={{tier: {{host_rows: {str(host_rows).lower()}}}}}"
        return load(ROOT / "configs/grm_tiny.yaml", ["model.contextual=[user_budget]", "model.num_blocks=1", tables])

    random = np.random.default_rng(0)
    data = [ranking_batch(random.integers(0, 20, 8), random.integers(1, 6, 8), seed) for seed in range(8)]

    def losses(where: str, schedule: Any, host_rows: bool = False) -> np.ndarray:
        keras.utils.set_random_seed(3)
        with tf.device(where):
            embedding = make_embedding(run(host_rows))
        grm = make_model(run(host_rows), embedding, np.arange(1, 60), np.ones(59))
        grm.schedule = schedule
        grm.compile(keras.optimizers.Adam(0.002))
        dataset = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=of_any_size(data[0]))
        found = np.array(grm.fit(dataset, epochs=4, verbose=0).history["loss"])
        on_device = "host_rows" if host_rows else "device"
        assert embedding.internals.groups[0].table.place.name == ("CPU" if "CPU" in where else on_device)
        return found

    wanted = losses(CPU, "sync")
    for schedule, host_rows in (("sync", False), (DualBuffer(), False), (DualBuffer(), True)):
        ours = losses(device, schedule, host_rows)
        print(f"losses on the CPU {wanted}, on {device} {ours}, {schedule}, host_rows={host_rows}")
        assert ours[-1] < ours[0]
        # Both runs have equal rows and dense layers on the same device, whose own kernels may add in any order.
        np.testing.assert_allclose(ours, wanted, rtol=2e-2)


def train_on_rank(device: str) -> list[np.ndarray]:
    """The body of a rank: trains on its half of every batch, and returns its records."""
    embedding = layer(device, "ranks")
    step = step_of(embedding, device)
    rank, size = fr.rank(), fr.size()
    for item, past in batches(1):
        step(item[rank::size], past[rank::size])
    return records_of(embedding)


def ranks(device: str) -> None:
    """Two ranks on one device hold what two ranks on the CPU hold, and each id once."""
    try:
        from tests.support.ranks import run_ranks
    except ImportError as error:
        raise LeftOut(f"Horovod is not installed: {error}") from error
    from tests.gpu import tensorflow_steps  # ranks import the body from its module, which is not __main__

    results = [run_ranks(tensorflow_steps.train_on_rank, 2, device=where) for where in (CPU, device)]
    for ours, wanted in zip(results[1], results[0]):
        assert len(wanted[0]) > 5
        for mine, theirs in zip(ours, wanted):
            np.testing.assert_array_equal(mine, theirs)
    assert not set(results[1][0][0]) & set(results[1][1][0])
    print(f"rows of the ranks: {[len(ids) for ids, _ in results[1]]}")


STEPS: dict[str, Callable[[str], None]] = {
    "placement": placement, "memory": memory, "bits": bits, "streams": streams, "ranks": ranks, "model": model,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("--device", default="/GPU:0")
    options = parser.parse_args()
    print(f"{options.name} on {options.device}", flush=True)
    try:
        STEPS[options.name](options.device)
    except LeftOut as reason:
        print(reason)
        return LEFT_OUT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
