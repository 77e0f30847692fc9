"""The tables of simulated ranks, with the dictionaries that they must equal, and their checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tests.checkpoint.simulated import DENSE
from tests.oracles.hash_table import Exhausted, TableOracle, pack
from tests.oracles.initial_rows import initial_row_oracle
from tests.oracles.rank_partition import owner_oracle
from tf_fusedrec import tf
from tf_fusedrec.checkpoint import loading, saving
from tf_fusedrec.files import saves
from tf_fusedrec.files.hash_order import table_seed
from tf_fusedrec.tables.native import NativeTable

TABLES, DIM, SEED = ("a", "b"), 3, 7
TIER_BYTES = 480  # of one table: with both, 24 rows with momentum, as many as the largest batch, stay in memory
KINDS = ("keys", "hits", "inserts", "evictions", "refused", "candidates")  # statistics
KEEP = 2  # saves
NO_LIMITS = {
    "max_rows": 0, "eviction": "none", "ttl": 0, "admission_count": 1, "max_candidates": 0, "frequency_decay_steps": 0,
}  # fmt: skip
RATE, MOMENTUM = 0.25, 0.5  # powers of two, as the gradients: sums are exact


@functools.cache
def initial(key: tuple[int, int]) -> np.ndarray:
    table, id_ = key
    return initial_row_oracle("uniform", 0.0, 1.0, table_seed(SEED, TABLES[table]) % 2**64, id_, DIM)


class Oracle(TableOracle):
    """Adds momentum, a slot of every row."""

    def __init__(self, *, momentum: float, **policies: Any):
        super().__init__(len(TABLES), initial, **policies)
        self.momentum = momentum

    def train(self, received: list, grads: np.ndarray) -> None:
        sums: dict = {}
        for key, grad in zip(received, grads):
            sums[key] = sums.get(key, np.float32(0)) + grad
        for (s, i), total in sums.items():
            if i in self.rows[s]:
                row = self.rows[s][i]
                row.slot = np.float32(self.momentum) * slot_of(row) - np.float32(RATE) * total
                row.numbers = row.numbers + row.slot


def slot_of(row: Any) -> np.ndarray:
    return getattr(row, "slot", np.zeros(DIM, np.float32))


def table_config(name: str, momentum: float, tier_folder: str, **policies: Any) -> fr.TableConfig:
    """Returns the table's configuration. With a folder, few rows stay in memory. Limits are lists, by table."""
    own = {field: value[TABLES.index(name)] if field in NO_LIMITS else value for field, value in policies.items()}
    per_rank = {field: f"{field}_per_rank" for field in ("max_rows", "max_candidates")}  # the oracle's short names
    limits = fr.Limits(**{per_rank.get(field, field): own.pop(field) for field in NO_LIMITS if field in own})
    limits = dataclasses.replace(limits, eviction=None if limits.eviction == "none" else limits.eviction)
    tier = fr.Tier(TIER_BYTES, tier_folder) if tier_folder else fr.Tier()
    rule = fr.optimizers.SGD(RATE, momentum=momentum)
    return fr.TableConfig(name, DIM, rule, fr.Uniform(0.0, 1.0), limits=limits, tier=tier, **own)


class Ranks:
    """The R ranks of a job.

    Args:
      ranks: R.
      policies: Options of both tables, by the names of Oracle and table_config.
    """

    def __init__(self, ranks: int, policies: dict[str, Any]):
        self.policies = policies
        names = {name: value for name, value in policies.items() if name != "tier_folder"}
        configs = [table_config(name, **policies) for name in TABLES]
        self.tables = [NativeTable(f"soak-{rank}", configs, seed=SEED) for rank in range(ranks)]
        self.oracles = [Oracle(**names) for _ in range(ranks)]
        self.full: Any = None  # name of the last full save, and each rank's clocks then

    def owned(self, batch: list, rank: int) -> list:
        """Returns the ids that one rank receives of a batch, which is lists of ids by source and table."""
        mine = lambda ids: [i for i in ids if owner_oracle(i, len(self.tables), "hash_range") == rank]  # noqa: E731
        return [[mine(ids) for ids in source] for source in batch]

    def train(self, batch: list, number: int) -> None:
        """Makes one step. Every column and position has a different gradient, a multiple of 1/64."""
        for rank, (table, oracle) in enumerate(zip(self.tables, self.oracles)):
            message, splits, received = pack(self.owned(batch, rank))
            try:
                want = oracle.lookup(received)
            except Exhausted:
                try:
                    table.lookup((message, splits))
                except tf.errors.ResourceExhaustedError:
                    continue
                raise AssertionError("a batch that does not fit was taken") from None
            found = table.lookup((message, splits))
            _assert_rows(found.rows, want)
            grads = (number + np.arange(len(received) * DIM).reshape(-1, DIM) % 7).astype(np.float32) / 64
            table.update([(found, tf.constant(grads), None)], 1.0)
            oracle.train(received, grads)

    def find(self, batch: list) -> None:
        for rank, (table, oracle) in enumerate(zip(self.tables, self.oracles)):
            message, splits, received = pack(self.owned(batch, rank))
            _assert_rows(table.read((message, splits)), oracle.find(received))

    def prefetch(self, batch: list) -> None:
        for rank, table in enumerate(self.tables):
            table.prefetch(pack(self.owned(batch, rank))[:2])

    def remove(self, segment: int, ids: list[int]) -> None:
        for rank, (table, oracle) in enumerate(zip(self.tables, self.oracles)):
            mine = self.owned([[ids]], rank)[0][0]
            table.remove(TABLES[segment], np.array(mine, np.int64))
            oracle.remove(segment, mine)

    def evict(self, segment: int, count: int) -> None:
        for table, oracle in zip(self.tables, self.oracles):
            assert table.evict(TABLES[segment], count) == oracle.evict(segment, count)

    def clear(self) -> None:
        for table, oracle in zip(self.tables, self.oracles):
            table.clear()
            oracle.clear()
        self.full = None  # Tombstones are lost with the rows, so a delta would restore the rows.

    def save(self, directory: pathlib.Path, extra: Any, *, delta: bool) -> None:
        """Saves like checkpoint.Checkpointer: all rows, or the changes since the last full save."""
        name, since = self.full if delta and self.full else (None, [{}] * len(self.tables))
        self.full = self.full if name else None
        clocks = [dict.fromkeys(TABLES, int(table.clock)) for table in self.tables]
        plan = saving.make_plan(directory, len(self.tables), name, {})
        cuts = [
            list(saving.copy_tables([table], plan._replace(since=of_rank), rank))
            for rank, (table, of_rank) in enumerate(zip(self.tables, since))
        ]  # fmt: skip
        if name is None:
            for table, oracle in zip(self.tables, self.oracles):
                table.forget_tombstones()
                oracle.forget_tombstones()
        for rank, of_rank in enumerate(cuts):
            saving.write_shard(directory, plan, of_rank, rank)
        saving.commit(directory, plan, DENSE, extra, timeout_s=5, keep=KEEP)
        if name is None:
            self.full = plan.save, clocks

    def saved(self) -> list[Oracle]:
        """Returns the expected contents of a checkpoint of the current state."""
        return copy.deepcopy(self.oracles)

    def load(self, directory: pathlib.Path, saved: list[Oracle], save: str | None = None) -> None:
        """Replaces all rows by a save of any number of ranks, whose contents must equal `saved`."""
        described = saves.read_manifest(directory, save)["tables"]
        for rank, table in enumerate(self.tables):
            loading.restore(loading.open_tables(directory, described, [table], rank, len(self.tables)), [table])
        for rank, oracle in enumerate(self.oracles):
            oracle.clear()
            oracle.clock = max(other.clock for other in saved)
            for kept, section in ((oracle.rows, "rows"), (oracle.candidates, "candidates")):
                for other in saved:
                    for mine, theirs in zip(kept, copy.deepcopy(getattr(other, section))):
                        owns = {i for i in theirs if owner_oracle(i, len(self.oracles), "hash_range") == rank}
                        mine.update({i: theirs[i] for i in owns})
        self.full = None

    def check(self) -> None:
        """Compares every readable state of the tables."""
        for table, oracle in zip(self.tables, self.oracles):
            for found, counts in zip(table.statistics.values(), oracle.statistics()):
                assert [found[kind] for kind in KINDS] == counts
            assert table.clock & 0xFFFFFFFF == oracle.clock
            for s, name in enumerate(TABLES):
                ids, records = table.snapshot(name)
                want = oracle.export(s)
                assert ids.tolist() == [i for i, _ in want]
                assert records["last"].tolist() == [row.last for _, row in want]
                assert records["count"].tolist() == [row.count for _, row in want]
                _assert_rows(records["row"], [row.numbers for _, row in want])
                if "momentum" in records.dtype.names:
                    _assert_rows(records["momentum"], [slot_of(row) for _, row in want])
                assert table.tombstones(name).tolist() == oracle.tombstones(s)
                if "candidates" in table.sections_of(name):
                    ids, counts = table.snapshot(name, "candidates")
                    assert list(zip(ids.tolist(), counts["count"].tolist())) == oracle.export_candidates(s)


def _assert_rows(got: Any, want: list) -> None:
    np.testing.assert_array_equal(np.asarray(got)[: len(want)], np.reshape(want, [-1, DIM]))
