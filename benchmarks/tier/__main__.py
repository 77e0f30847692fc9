"""Question: what does a table lose when three rows of four are in a file, and how much does look-ahead regain?

    python -m benchmarks.tier [--quick] [--json FILE]

The table is four times as large as its memory budget. All variants train on the same batches and take turns by blocks
of steps. A check comes first: all tables must be equal, bit by bit.

The page cache would hold a file of this size. So, before every block of a cold variant, the benchmark writes back its
pages and removes them from memory (msync, MADV_PAGEOUT). This time is not measured. Steps then read rows from the disk.
kb_read_per_step is the kernel's count of these bytes. The system writes rows to the file later, and the figures do not
include that time. The file is in the working folder, which must be on a local disk.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from tf_fusedrec import optimizers, tf
from tf_fusedrec.tables import NativeTable

DIM, ROW_BYTES = 64, 288  # header 16, row 256, one accumulator, rounded up to 16
AHEAD = 2  # batches between a prefetch and its lookup
STEPS = 8  # per block
SHARE = 4  # size of the table over its budget


_MS_SYNC, _MADV_PAGEOUT = 4, 21
_libc = ctypes.CDLL(None, use_errno=True)


def _file_mappings() -> list[tuple[int, int]]:
    """Returns (address, bytes) of the mapped files of rows of this process."""
    lines = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [re.match(r"([0-9a-f]+)-([0-9a-f]+)", line) for line in lines if "/fusedrec-rows-" in line]
    spans = [(int(found[1], 16), int(found[2], 16)) for found in ranges if found]
    return [(begin, end - begin) for begin, end in spans]


def give_up_pages() -> float:
    """Writes back the files of rows and removes their pages from memory. Returns the share of pages that stayed."""
    pages = resident = 0
    for address, size in _file_mappings():
        for call, flag in ((_libc.msync, _MS_SYNC), (_libc.madvise, _MADV_PAGEOUT)):
            if call(ctypes.c_void_p(address), ctypes.c_size_t(size), flag) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise harness.CheckFailed(f"The tier's pages stay in memory: {reason}. Use Linux 5.4 or later.")
        present = (ctypes.c_ubyte * (size // 4096))()
        _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present)
        pages += len(present)
        resident += int(np.sum(np.ctypeslib.as_array(present) & 1))
    return resident / max(pages, 1)


class Case(NamedTuple):
    """Sizes of a run."""

    rows: int
    ids: int  # per step
    blocks: int  # measured blocks of each variant


class Variant:
    """A layer and its training step, with or without look-ahead."""

    def __init__(self, name: str, rows: int, folder: str | None, lookahead: bool):
        budget: dict[str, Any] = {}
        if folder is not None:
            budget = {"tier": fr.Tier(memory_budget=rows // SHARE * ROW_BYTES, folder=folder)}
        table = fr.TableConfig("t", DIM, optimizers.RowWiseAdagrad(0.05, variant="2d_sp"), **budget)
        self.emb = fr.FusedEmbedding([table], [fr.FeatureConfig("t", "t")], name=name)
        self._lookahead = lookahead
        self._step = tf.function(self._train, input_signature=[tf.TensorSpec([None], tf.int64)] * 2)

    @property
    def table(self) -> NativeTable:
        table = self.emb.internals.groups[0].table
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
        """Trains on the batches in turn, and prefetches the batch that comes AHEAD steps later."""
        nothing = tf.zeros([0], tf.int64)
        return [self._step(ids, coming) for ids, coming in zip(batches, [*batches[AHEAD:], *[nothing] * AHEAD])]


def _blocks(case: Case, count: int, seed: int) -> list[list[tf.Tensor]]:
    """Returns blocks of batches with ids by zipf(1.05), as in other benchmarks, over all rows of the table."""
    random = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, case.rows + 1) ** -1.05)
    place = np.random.default_rng(0).permutation(case.rows)  # hot rows are anywhere in the table
    ranks = np.searchsorted(weights / weights[-1], random.random((count, STEPS, case.ids)))
    return [[tf.constant(ids) for ids in block] for block in place[ranks]]


def _check(variants: dict[str, Variant], case: Case) -> None:
    """Trains two blocks and compares every lookup, and then the contents of the tables."""
    for block in _blocks(case, 2, seed=1):
        want = variants["memory"].train(block)
        for name in set(variants) - {"memory"}:
            for got, wanted in zip(variants[name].train(block), want):
                harness.check_equal(f"rows of {name}", got, wanted)
    wanted_ids, wanted_records = variants["memory"].table.snapshot("t")
    for name in set(variants) - {"memory"}:
        table = variants[name].table
        ids, records = table.snapshot("t")
        harness.check_equal(f"ids of {name}", ids, wanted_ids)
        for field in set(records.dtype.names) - {"pool"}:
            harness.check_equal(f"{field} of {name}", records[field], wanted_records[field])
        if table.memory["second_rows"] < (SHARE - 1) * table.memory["rows"]:
            raise harness.CheckFailed(f"{name} has {table.memory}; {SHARE - 1} of {SHARE} rows must be in its file.")


def measure(case: Case) -> dict[str, Any]:
    """Returns the fields of the JSON file. Rates count ids with duplicates."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path.cwd()) as folder:
        plan = {"memory": (None, False), "tier": (folder, False), "tier_lookahead": (folder, True),
                "tier_cached": (folder, False)}  # fmt: skip
        variants = {name: Variant(name, case.rows, *options) for name, options in plan.items()}
        for variant in variants.values():
            for begin in range(0, case.rows, case.ids):
                variant.train([tf.range(begin, min(begin + case.ids, case.rows), dtype=tf.int64)])
        _check(variants, case)
        seconds: dict[str, list[float]] = {name: [] for name in plan}
        read = dict.fromkeys(plan, 0)
        stayed: list[float] = []
        blocks, process = _blocks(case, case.blocks, seed=2), psutil.Process()
        for n, name in harness.in_turns(list(plan), case.blocks):
            if name in ("tier", "tier_lookahead"):
                stayed.append(give_up_pages())
            elif name == "tier_cached":  # the other variants removed its pages too: a lookup of all rows reads them
                variants[name].emb({"t": tf.range(case.rows, dtype=tf.int64)}, training=False)
            started, before = time.perf_counter(), process.io_counters().read_bytes
            variants[name].train(blocks[n])
            seconds[name].append(time.perf_counter() - started)
            read[name] += process.io_counters().read_bytes - before
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
    arguments = harness.parser(__doc__).parse_args()
    case = Case(rows=100_000, ids=4096, blocks=4) if arguments.quick else Case(rows=1_000_000, ids=8192, blocks=12)
    results = measure(case)
    harness.print_fields("a table four times its memory budget, bit-equal to one in memory", results)
    harness.write_json(arguments.json, results)


if __name__ == "__main__":
    processes.program(main)
