"""Question: what do a save and a load cost beside the disk itself, and how long does training wait for a save?

    python -m benchmarks.checkpoint [--quick] [--json FILE]

A check comes first: a load must bring back all rows, bit by bit. Then a save and a load of one rank take turns with
plain files. A plain write writes as many bytes, syncs the file and replaces the last one. A plain read reads it again.
No read uses the page cache. A save copies the rows out of the table and writes them. A load inserts them into an empty
table.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from tf_fusedrec import keras, tf
from tf_fusedrec.files import disk
from tf_fusedrec.files.hash_order import mix64
from tf_fusedrec.tables import NativeTable

DIM = 64
CHANGED_SHARE = 0.01  # share of the rows that a delta saves
_BLOCK = 1 << 25  # bytes that a plain read reads at a time


def table_config() -> fr.TableConfig:
    """Returns a table whose record has two vectors: the row and Adagrad's accumulator."""
    return fr.TableConfig("item", DIM, keras.optimizers.Adagrad(0.1), record_tombstones=True)


def random_rows(table: NativeTable, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids <int64>[n] in hash order, and records [n]."""
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(2**63), 2**63, rows))
    ids = ids[np.argsort(mix64(ids))]
    records = table.new_records("item", len(ids))
    records["row"], records["accumulator"] = random.random((2, len(ids), DIM), np.float32)
    records["count"] = np.arange(len(ids))
    return ids, records


class Job:
    """One rank's model, its table of `rows` rows, and the folder of its checkpoints."""

    def __init__(self, folder: pathlib.Path, rows: int):
        self.folder, self.rows = folder, rows
        self.dense = keras.Sequential([keras.layers.Dense(1, input_shape=(DIM,))])
        self.embedding = self.layer()
        self.ids, records = random_rows(self.table, rows)
        self.bytes = records.nbytes + self.ids.nbytes
        self.table.restore("item", "rows", self.ids, records)
        self.buffer = np.resize(records.view(np.uint8), self.bytes)

    @staticmethod
    def layer() -> fr.FusedEmbedding:
        return fr.FusedEmbedding(tables=[table_config()], features=[fr.FeatureConfig("item", "item")])

    @property
    def table(self) -> Any:
        return self.embedding.internals.groups[0].table

    def save(self) -> float:
        """Returns the seconds of a full save, which ends with its bytes on the disk."""
        begin = time.perf_counter()
        fr.checkpoint.save(self.folder / "c", self.dense, layers=[self.embedding])
        return time.perf_counter() - begin

    def load(self, check: bool = False) -> float:
        """Returns the seconds of a load into an empty table. `check` compares all rows, bit by bit."""
        self.forget_pages()
        loaded = self.layer()
        begin = time.perf_counter()
        fr.checkpoint.load(self.folder / "c", self.dense, layers=[loaded])
        seconds = time.perf_counter() - begin
        table: Any = loaded.internals.groups[0].table
        harness.check_equal("rows loaded", table.size("item"), len(self.ids))
        if check:
            (ids, records), (of_ids, of_records) = (one.snapshot("item") for one in (table, self.table))
            harness.check_equal("ids", ids, of_ids)
            for field in records.dtype.names:
                if field != "pool":  # the place of a row in memory
                    harness.check_equal(field, records[field], of_records[field])
        return seconds

    def plain_write(self) -> float:
        """Returns the seconds of writing as many bytes to a synced file that replaces the last one, as a save does."""
        path = self.folder / "plain.partial"
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            disk.write(file.fileno(), self.buffer)
            os.fsync(file.fileno())
        path.replace(self.folder / "plain")
        return time.perf_counter() - begin

    def plain_read(self) -> float:
        self.forget_pages()
        into = bytearray(_BLOCK)
        begin = time.perf_counter()
        with (self.folder / "plain").open("rb", buffering=0) as file:
            while file.readinto(into):
                pass
        return time.perf_counter() - begin

    def copy(self) -> float:
        """Returns the seconds of copying the rows to an array whose pages are not mapped yet."""
        begin = time.perf_counter()
        self.buffer.copy()
        return time.perf_counter() - begin

    def forget_pages(self) -> None:
        """Drops the files from the page cache. They are synced, so that the kernel may drop them."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def pauses(self, repeats: int) -> dict[str, list[float]]:
        """Returns the seconds for which training waits for background saves, full ones and deltas."""
        changed = tf.constant(self.ids[:: int(1 / CHANGED_SHARE)])
        seconds: dict[str, list[float]] = {"full": [], "delta": []}
        checkpointer = fr.checkpoint.Checkpointer(
            self.folder / "pauses", self.dense, layers=[self.embedding], full_every=2, background=True
        )
        for _ in range(repeats):
            for kind in seconds:
                self.step(changed)
                checkpointer.save()
                checkpointer.wait()
                seconds[kind].append(checkpointer.pause_s)
        return seconds

    def step(self, ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.embedding({"item": ids})["item"])
        tape.gradient(loss, self.embedding.trainable_variables)


def summary(seconds: Mapping[str, Sequence[float]], size: int, pauses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the fields of the JSON file, from medians. `size` is the number of bytes that each variant moves."""
    median = {name: harness.timing(values).median_s for name, values in seconds.items()}
    names = {"save": "save", "load": "load", "plain_write": "disk_write", "plain_read": "disk_read"}
    return {
        **{f"{field}_gb_per_s": size / 1e9 / median[name] for name, field in names.items()},
        "save_ratio_vs_disk": median["plain_write"] / median["save"],
        "load_ratio_vs_disk": median["plain_read"] / median["load"],
        "snapshot_pause_ms": 1e3 * harness.timing(pauses["full"]).median_s,
        "delta_pause_ms": 1e3 * harness.timing(pauses["delta"]).median_s, "copy_rows_ms": 1e3 * median["copy"],
    }  # fmt: skip


def measure(folder: pathlib.Path, rows: int, repeats: int) -> dict[str, Any]:
    """Times a job's saves and loads in turns with plain files, then the pauses of background saves."""
    job = Job(folder, rows)
    job.save(), job.load(check=True)
    variants = [job.save, job.plain_write, job.load, job.plain_read, job.copy]
    seconds: dict[str, list[float]] = {variant.__name__: [] for variant in variants}
    for repeat in range(-1, repeats):
        for variant in variants:
            taken = variant()
            seconds[variant.__name__] += [taken] if repeat >= 0 else []
    return {**summary(seconds, job.bytes, job.pauses(max(repeats // 2, 1))), "rows": rows, "bytes": job.bytes}


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    where = harness.ROOT / "build"  # the system's folder for temporary files may be in memory
    where.mkdir(exist_ok=True)
    rows, repeats = (500_000, 5) if arguments.quick else (4_000_000, 9)
    with tempfile.TemporaryDirectory(dir=where) as folder:
        fields = measure(pathlib.Path(folder), rows, repeats)
    harness.print_fields(
        f"checkpoint: {rows} rows of {DIM} columns with Adagrad; a delta of {CHANGED_SHARE:.0%}", fields
    )
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
