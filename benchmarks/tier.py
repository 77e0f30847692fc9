"""The tier below memory: a table four times its memory budget against the same table in memory.

    python -m benchmarks.tier [--quick] [--json FILE]

What does it cost that three rows of four lie in a file, and how much of that does look-ahead give back? All contenders
train on the same batches, checked to be bit-equal, and take turns block by block. A file of this size would stay in the
page cache; so before every block of the cold contenders its pages are written back and given up (msync, MADV_PAGEOUT),
outside of the time that is taken. Rows are then read from the disk as they are needed; kb_read_per_step, by the
kernel's count, says how much of that was so. Rows that go back to the file are written by the system later: that time
is not in these numbers. The file is in the working folder, which must be on a local disk.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks import harness
from tf_fusedrec import optimizers, tf
from tf_fusedrec.tables import NativeTable

DIM, ROW_BYTES = 64, 288  # header 16, row 256, one accumulator, rounded up to 16
AHEAD = 2  # batches between a prefetch and its lookup
STEPS = 8  # of a block
SHARE = 4  # the table is so many times its budget
_MS_SYNC, _MADV_PAGEOUT = 4, 21
_libc = ctypes.CDLL(None, use_errno=True)


class Case(NamedTuple):
    """Sizes of a run."""

    rows: int
    ids: int  # of a step
    blocks: int  # measured, of each contender


class Contender:
    """A layer and its training step, with or without look-ahead."""

    def __init__(self, name: str, rows: int, folder: str | None, lookahead: bool):
        budget: dict[str, Any] = {}
        if folder is not None:
            budget = {"memory_budget": rows // SHARE * ROW_BYTES, "tier_folder": folder}
        table = fr.TableConfig("t", DIM, optimizers.RowWiseAdagrad(0.05), **budget)
        self.emb = fr.FusedEmbedding([table], [fr.FeatureConfig("t", "t")], name=name)
        self._lookahead = lookahead
        self._step = tf.function(self._train, input_signature=[tf.TensorSpec([None], tf.int64)] * 2)

    @property
    def table(self) -> NativeTable:
        table = self.emb.lookups[0].table
        assert isinstance(table, NativeTable)
        return table

    def _train(self, ids: tf.Tensor, coming: tf.Tensor) -> tf.Tensor:
        if self._lookahead:
            self.emb.prefetch({"t": coming})
        with tf.GradientTape() as tape:
            rows = self.emb({"t": ids})["t"]
            loss = tf.reduce_sum(tf.square(rows))
        tape.gradient(loss, self.emb.trainable_variables)
        return rows

    def train(self, batches: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Trains on batches one after another; prefetches those that come AHEAD steps later."""
        nothing = tf.zeros([0], tf.int64)
        return [self._step(ids, coming) for ids, coming in zip(batches, [*batches[AHEAD:], *[nothing] * AHEAD])]


def _file_mappings() -> list[tuple[int, int]]:
    """(address, bytes) of the files of rows that this process has mapped."""
    lines = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [re.match(r"([0-9a-f]+)-([0-9a-f]+)", line) for line in lines if "/fusedrec-rows-" in line]
    spans = [(int(found[1], 16), int(found[2], 16)) for found in ranges if found]
    return [(begin, end - begin) for begin, end in spans]


def give_up_pages() -> float:
    """Writes back the files of rows and takes their pages out of memory; returns the share that stayed there."""
    pages = resident = 0
    for address, size in _file_mappings():
        for call, flag in ((_libc.msync, _MS_SYNC), (_libc.madvise, _MADV_PAGEOUT)):
            if call(ctypes.c_void_p(address), ctypes.c_size_t(size), flag) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise harness.CheckFailed(f"Pages of the tier's file cannot be given up: {reason}. Linux 5.4 can.")
        present = (ctypes.c_ubyte * (size // 4096))()
        _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present)
        pages += len(present)
        resident += int(np.sum(np.ctypeslib.as_array(present) & 1))
    return resident / max(pages, 1)


def bytes_read() -> int:
    """Bytes that this process has had read from a disk."""
    found = re.search(r"^read_bytes: (\d+)$", pathlib.Path("/proc/self/io").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found.group(1)) if found else 0


def _blocks(case: Case, count: int, seed: int) -> list[list[tf.Tensor]]:
    """Blocks of batches: Zipf(1.05) ranks, as the other benchmarks have them, over all rows of the table."""
    random = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, case.rows + 1) ** -1.05)
    place = np.random.default_rng(0).permutation(case.rows)  # hot rows lie anywhere
    ranks = np.searchsorted(weights / weights[-1], random.random((count, STEPS, case.ids)))
    return [[tf.constant(ids) for ids in block] for block in place[ranks]]


def _fill(contender: Contender, case: Case) -> None:
    for begin in range(0, case.rows, case.ids):
        contender.train([tf.range(begin, min(begin + case.ids, case.rows), dtype=tf.int64)])


def _check(contenders: dict[str, Contender], case: Case) -> None:
    """Trains two blocks and compares every lookup, then all that the tables hold."""
    for block in _blocks(case, 2, seed=1):
        want = contenders["memory"].train(block)
        for name in set(contenders) - {"memory"}:
            for got, wanted in zip(contenders[name].train(block), want):
                harness.check_equal(f"rows of {name}", got, wanted)
    wanted_ids, wanted_records = contenders["memory"].table.snapshot("t")
    for name in set(contenders) - {"memory"}:
        table = contenders[name].table
        ids, records = table.snapshot("t")
        harness.check_equal(f"ids of {name}", ids, wanted_ids)
        for field in set(records.dtype.names) - {"pool"}:
            harness.check_equal(f"{field} of {name}", records[field], wanted_records[field])
        if table.memory["second_rows"] < (SHARE - 1) * table.memory["rows"]:
            raise harness.CheckFailed(f"{name} has {table.memory}: the file does not hold what it should.")


def _timed(work: Callable[[], object]) -> tuple[float, int]:
    begin, read = time.perf_counter(), bytes_read()
    work()
    return time.perf_counter() - begin, bytes_read() - read


def measure(case: Case) -> dict[str, Any]:
    """Fields of the JSON: rates in ids per second, an id counted before duplicates go."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        plan = {"memory": (None, False), "tier": (folder, False), "tier_lookahead": (folder, True),
                "tier_cached": (folder, False)}  # fmt: skip
        contenders = {name: Contender(name, case.rows, *options) for name, options in plan.items()}
        for contender in contenders.values():
            _fill(contender, case)
        _check(contenders, case)
        seconds: dict[str, list[float]] = {name: [] for name in plan}
        read = dict.fromkeys(plan, 0)
        stayed = []
        for n, block in enumerate(_blocks(case, case.blocks, seed=2)):
            names = list(plan)
            for name in names[n % len(names) :] + names[: n % len(names)]:
                if name in ("tier", "tier_lookahead"):
                    stayed.append(give_up_pages())
                elif name == "tier_cached":  # its pages went with those of the others: read them all
                    contenders[name].emb({"t": tf.range(case.rows, dtype=tf.int64)}, training=False)
                taken, bytes_ = _timed(functools.partial(contenders[name].train, block))
                seconds[name].append(taken)
                read[name] += bytes_
    per_block = STEPS * case.ids
    rates = {f"ids_per_s_{name}": per_block / harness.timing(taken).median_s for name, taken in seconds.items()}
    return {
        "rows": case.rows, "ids_per_step": case.ids, "dim": DIM, "table_bytes": case.rows * ROW_BYTES,
        "budget_bytes": case.rows // SHARE * ROW_BYTES, **rates,
        "ratio": rates["ids_per_s_tier_lookahead"] / rates["ids_per_s_memory"],
        "ratio_lookahead": rates["ids_per_s_tier_lookahead"] / rates["ids_per_s_tier"],
        "kb_read_per_step_tier": read["tier"] / 1e3 / case.blocks / STEPS,
        "kb_read_per_step_tier_lookahead": read["tier_lookahead"] / 1e3 / case.blocks / STEPS,
        "share_of_pages_that_stayed": float(np.mean(stayed)),
    }  # fmt: skip


def main() -> None:
    arguments = harness.parse_arguments(__doc__)
    case = Case(rows=100_000, ids=4096, blocks=4) if arguments.quick else Case(rows=1_000_000, ids=8192, blocks=12)
    results = measure(case)
    names = ["memory", "tier_cached", "tier", "tier_lookahead"]
    table = [{"rows in": name, "ids_per_s": results[f"ids_per_s_{name}"]} for name in names]
    harness.print_table("a table four times its memory budget, bit-equal to one in memory", table)
    print(f"  look-ahead {results['ratio_lookahead']:.2f} times without, {results['ratio']:.2f} times memory")
    harness.write_json(arguments.json, results)


if __name__ == "__main__":
    harness.run(main)
