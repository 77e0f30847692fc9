"""Question: what do a save and a load cost beside the disk itself, and how long does training wait for a save?

    python -m benchmarks.checkpoint [--quick] [--json FILE]

A check comes first: a table moves from 2 ranks to 3, to 1 and to 4, all simulated in this process. Every row must be at
its owner, bit by bit. `extra_bytes_fraction` is the share of bytes that ranks read beyond their own rows.

Then a save and a load of one rank take turns with plain files. A plain write writes as many bytes, syncs the file and
replaces the last one. A plain read reads it again. No read uses the page cache. A save copies the rows out of the table
and writes them. A load inserts them into an empty table.
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
from benchmarks.harness import harness
from tf_fusedrec import keras, tf
from tf_fusedrec.checkpoint import disk, folders, resharding, saving
from tf_fusedrec.tables import NativeTable
from tf_fusedrec.tables.hash_order import hash_range_owner, mix64

DIM = 64
ROUND_TRIP = (2, 3, 1, 4)  # numbers of ranks
CHANGED_SHARE = 0.01  # share of the rows that a delta saves
NO_WEIGHTS = {"dense.index": b"", "dense.data-00000-of-00001": b""}  # files that no load reads here
_BLOCK = 1 << 25  # bytes that a plain read reads at a time


def table_config() -> fr.TableConfig:
    """Returns a table whose record has two vectors: the row and Adagrad's accumulator."""
    return fr.TableConfig("item", DIM, keras.optimizers.legacy.Adagrad(0.1), record_tombstones=True)


def random_rows(table: NativeTable, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids <int64>[n] in hash order, and records [n]."""
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(2**63), 2**63, rows))
    ids = ids[np.argsort(mix64(ids))]
    records = table.new_records("item", len(ids))
    records["row"], records["accumulator"] = random.random((2, len(ids), DIM), np.float32)
    records["count"] = np.arange(len(ids))
    return ids, records


def round_trip(folder: pathlib.Path, rows: int) -> float:
    """Moves a table through ROUND_TRIP. Returns the largest share of bytes that a rank read beyond its own rows.

    Raises:
      CheckFailed: A row has changed, is lost, or is not at its owner.
    """
    tables = [NativeTable(f"round_trip/{rank}", [table_config()], seed=0) for rank in range(ROUND_TRIP[0])]
    ids, records = random_rows(tables[0], rows)
    for rank, table in enumerate(tables):
        mine = hash_range_owner(ids, len(tables)) == rank
        table.restore("item", "rows", ids[mine], records[mine])
    extra = 0.0
    for stage, ranks in enumerate(ROUND_TRIP[1:]):
        directory = folder / f"stage-{stage}"
        plan = saving.make_plan(directory, len(tables), None, {})
        for rank, table in enumerate(tables):
            saving.write_shard(directory, plan, saving.copy_tables([table], plan, rank), rank)
        saving.commit(directory, plan, NO_WEIGHTS, None, timeout_s=60)
        described = folders.read_manifest(directory)["tables"]
        tables = [NativeTable(f"round_trip/{stage}/{rank}", [table_config()], seed=0) for rank in range(ranks)]
        for rank, table in enumerate(tables):
            (share,) = resharding.open_tables(directory, described, [table], rank, ranks, partial=False)
            resharding.restore([share], [table])
            extra = max(extra, share.bytes_read / (table.size("item") * (8 + records.dtype.itemsize)) - 1)
        check_rows(f"{plan.ranks} -> {ranks} ranks", [table.snapshot("item") for table in tables], ids, records)
    return extra


def check_rows(
    what: str, by_rank: Sequence[tuple[np.ndarray, np.ndarray]], ids: np.ndarray, records: np.ndarray
) -> None:
    """Raises CheckFailed unless the ranks' rows, joined in the order of ranks, equal `ids` and `records` bit by bit."""
    for rank, (of_rank, _) in enumerate(by_rank):
        owners = hash_range_owner(of_rank, len(by_rank))
        harness.check_equal(f"{what}: owners of the rows of rank {rank}", owners, np.full_like(owners, rank))
    harness.check_equal(f"{what}: ids", np.concatenate([of_rank for of_rank, _ in by_rank]), ids)
    got = np.concatenate([of_rank for _, of_rank in by_rank])
    for field in records.dtype.names or ():
        bits = f"u{records.dtype[field].base.itemsize}"
        harness.check_equal(f"{what}: {field}", got[field].view(bits), records[field].view(bits))


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
        return self.embedding.lookups[0].table

    def save(self) -> float:
        """Returns the seconds of a full save, which ends with its bytes on the disk."""
        begin = time.perf_counter()
        fr.checkpoint.save(self.folder / "c", self.dense, layers=[self.embedding])
        return time.perf_counter() - begin

    def load(self) -> float:
        """Returns the seconds of a load into an empty table."""
        self.forget_pages()
        loaded = self.layer()
        begin = time.perf_counter()
        fr.checkpoint.load(self.folder / "c", self.dense, layers=[loaded])
        seconds = time.perf_counter() - begin
        harness.check_equal("rows loaded", loaded.lookups[0].table.size("item"), len(self.ids))
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
        """Returns the seconds of reading the plain file."""
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
        """Trains these rows once."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.embedding({"item": ids})["item"])
        tape.gradient(loss, self.embedding.trainable_variables)


def summary(seconds: Mapping[str, Sequence[float]], size: int, pauses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the fields of the JSON file, from medians. `size` is the number of bytes that each variant moves."""
    gb_per_s = {
        name: size / 1e9 / harness.timing(values).median_s for name, values in seconds.items() if name != "copy"
    }
    return {
        "save_gb_per_s": gb_per_s["save"],
        "load_gb_per_s": gb_per_s["load"],
        "disk_write_gb_per_s": gb_per_s["plain_write"],
        "disk_read_gb_per_s": gb_per_s["plain_read"],
        "save_ratio_vs_disk": gb_per_s["save"] / gb_per_s["plain_write"],
        "load_ratio_vs_disk": gb_per_s["load"] / gb_per_s["plain_read"],
        "snapshot_pause_ms": 1e3 * harness.timing(pauses["full"]).median_s,
        "delta_pause_ms": 1e3 * harness.timing(pauses["delta"]).median_s,
        "copy_rows_ms": 1e3 * harness.timing(seconds["copy"]).median_s,
    }


def measure(folder: pathlib.Path, rows: int, repeats: int) -> dict[str, Any]:
    """Times a job's saves and loads in turns with plain files, then the pauses of background saves."""
    job = Job(folder, rows)
    variants = {
        "save": job.save,
        "plain_write": job.plain_write,
        "load": job.load,
        "plain_read": job.plain_read,
        "copy": job.copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-1, repeats):
        for name, variant in variants.items():
            taken = variant()
            if repeat >= 0:
                seconds[name].append(taken)
    return {**summary(seconds, job.bytes, job.pauses(max(repeats // 2, 1))), "rows": rows, "bytes": job.bytes}


def report(fields: Mapping[str, Any]) -> None:
    """Prints the tables."""
    rates = [("save", "plain write", "disk_write"), ("load", "plain read", "disk_read")]
    harness.print_table(
        f"checkpoint: {fields['rows']} rows of {DIM} columns with Adagrad, {fields['bytes'] / 1e9:.2f} GB",
        [
            {
                "": kind,
                "GB/s": fields[f"{kind}_gb_per_s"],
                "against": other,
                "its GB/s": fields[f"{name}_gb_per_s"],
                "ratio": fields[f"{kind}_ratio_vs_disk"],
            }
            for kind, other, name in rates
        ],
    )
    copy_ms = fields["copy_rows_ms"]
    harness.print_table(
        "training waits for a save in the background",
        [
            {"rows": "all", "ms": fields["snapshot_pause_ms"], "their bytes copied, ms": copy_ms},
            {
                "rows": f"the {CHANGED_SHARE:.0%} that changed",
                "ms": fields["delta_pause_ms"],
                "their bytes copied, ms": copy_ms * CHANGED_SHARE,
            },
        ],
    )


def main() -> None:
    arguments = harness.parse_arguments("Saves and loads of checkpoints against the disk's own rate.")
    where = harness.ROOT / "build"  # the system's folder for temporary files may be in memory
    where.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as folder:
        path = pathlib.Path(folder)
        extra = round_trip(path, 200_000 if arguments.quick else 1_000_000)
        ranks = " -> ".join(map(str, ROUND_TRIP))
        print(f"{ranks} ranks: all rows are equal; a rank read at most {extra:.2%} beyond its own rows", flush=True)
        fields = measure(path, 500_000 if arguments.quick else 4_000_000, repeats=5 if arguments.quick else 9)
    fields["extra_bytes_fraction"] = extra
    report(fields)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    harness.run(main)
