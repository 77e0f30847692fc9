"""Compares tables and checkpoints with dictionaries under random operations of a job, crashes included."""

from __future__ import annotations

import collections
import pathlib
import random
import shutil
import tempfile
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.soak.power_loss import Crashed, PowerLoss
from tests.soak.ranks import KEEP, MOMENTUM, NO_LIMITS, Ranks
from tests.support.ids import INT64_MAX, INT64_MIN
from tf_fusedrec import checkpoint
from tf_fusedrec.files.manifest import exists
from tf_fusedrec.files.saves import read_manifest

IDS = [*range(16), -1, INT64_MIN, INT64_MAX, 1 << 40]
# A memory file system suffices, because power_loss.py simulates the disk.
SHARED_MEMORY = pathlib.Path("/dev/shm")

ids = st.lists(st.sampled_from(IDS), max_size=6)
batches = st.lists(st.tuples(ids, ids), min_size=1, max_size=2)  # Ids by source and table.
segments = st.sampled_from([0, 1])
# Options of one table that TableConfig accepts together.
limits = st.builds(
    lambda rows, admission, ttl: {**NO_LIMITS, **rows, **admission, "ttl": ttl},
    rows=st.sampled_from(
        [
            {},
            {"max_rows": 8},
            *({"max_rows": n, "eviction": e} for n in (4, 8) for e in ("lru", "lfu")),
            {"max_rows": 8, "eviction": "lfu", "frequency_decay_steps": 3},
        ]  # fmt: skip
    ),
    admission=st.sampled_from(
        [{}, {}, {"admission_count": 2}, {"admission_count": 3}, {"admission_count": 2, "max_candidates": 64}]
    ),
    ttl=st.sampled_from([0, 0, 1, 3]),
)
# Both tables are one group, each with limits of its own.
policies = st.builds(
    lambda first, second, **others: {**{name: [first[name], second[name]] for name in NO_LIMITS}, **others},
    first=limits,
    second=limits,
    momentum=st.sampled_from([0.0, MOMENTUM]),
    record_tombstones=st.sampled_from([True, True, False]),
)
# Faults of a save: the number of the file operation, and a random choice of the surviving changes.
moments = st.tuples(st.sampled_from(["crash", "full disk"]), st.integers(0, 150), st.integers(0, 2**32))


class Machine(RuleBasedStateMachine):
    """A stateful test. `executed` counts the rules of all machines of this process by name."""

    executed: collections.Counter = collections.Counter()

    @initialize(policies=policies, ranks=st.integers(1, 3), tier=st.booleans())
    def create(self, policies: dict, ranks: int, tier: bool) -> None:
        home = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="soak-", dir=home))
        self.disk = self.home / "disk"
        self.disk.mkdir()
        self.directory = self.disk / "checkpoint"
        self.policies = {**policies, "tier_folder": str(self.home) if tier else ""}
        self.job = Ranks(ranks, self.policies)
        self.saves = 0
        self.states: dict[int, Any] = {}  # Expected contents of each save, by its number.
        self.saved: Any = None  # Number and contents of the last save, or None.
        self.count("create")

    def count(self, name: str) -> None:
        self.executed[name] += 1

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home)

    @invariant()
    def tables_agree_with_dictionaries(self) -> None:
        if hasattr(self, "job"):
            self.job.check()

    @rule(batch=batches, number=st.integers(-8, 8))
    def train(self, batch: list, number: int) -> None:
        self.count("train")
        self.job.train(batch, number)

    @rule(batch=batches)
    def look_up(self, batch: list) -> None:
        self.count("look up")
        self.job.find(batch)

    @rule(steps=st.integers(1, 4))
    def expire(self, steps: int) -> None:
        """Makes steps without ids, in which only time passes."""
        self.count("expire")
        for _ in range(steps):
            self.job.train([([], [])], 0)

    @rule(segment=segments, ids=ids)
    def remove(self, segment: int, ids: list) -> None:
        self.count("remove")
        self.job.remove(segment, ids)

    @rule(segment=segments, count=st.integers(0, 5))
    def evict(self, segment: int, count: int) -> None:
        self.count("evict")
        self.job.evict(segment, count)

    @precondition(lambda self: self.policies["tier_folder"])
    @rule(batch=batches)
    def tier(self, batch: list) -> None:
        """Moves rows from the file into memory."""
        self.count("tier")
        self.job.prefetch(batch)

    @rule()
    def clear(self) -> None:
        self.count("clear")
        self.job.clear()

    @rule(delta=st.sampled_from([True, True, False]))
    def save(self, delta: bool) -> None:
        delta = delta and self.job.full is not None and self.policies["record_tombstones"]
        self.count("save a delta" if delta else "save all")
        self._save(delta)
        self.saved = self.saves, self.job.saved()

    def _save(self, delta: bool) -> None:
        self.saves += 1
        self.states[self.saves] = self.job.saved()
        self.job.save(self.directory, self.saves, delta=delta)

    @rule(delta=st.sampled_from([True, True, False]), moment=moments, ranks=st.integers(1, 3))
    def save_in_trouble(self, delta: bool, moment: tuple, ranks: int) -> None:
        """Leaves the last checkpoint or the new one in the folder. After a crash, a new job continues from it."""
        kind, operation, seed = moment
        self.count(f"save and {kind}")
        delta = delta and self.job.full is not None and self.policies["record_tombstones"]
        before, now = self.saved, (self.saves + 1, self.job.saved())
        trouble = {"crash_at": operation} if kind == "crash" else {"fail_at": operation}
        disk = PowerLoss(self.disk, **trouble)
        done = False
        try:
            with disk:
                self._save(delta)
            done = True
        except Crashed:
            pass
        except OSError:
            assert kind == "full disk"
            self.job.full = None  # The next save is full, as in Checkpointer.
        if kind == "crash":
            disk.crash(random.Random(seed))
            self.job = Ranks(ranks, self.policies)
        found = None
        if exists(self.directory):
            found = read_manifest(self.directory)["extra"]
        allowed = {state[0] if state else None: state for state in ([now] if done else [before, now])}
        assert found in allowed, f"save {found} was found, want one of {list(allowed)}"
        self.saved = allowed[found]
        if kind == "crash" and self.saved is not None:
            self.job.load(self.directory, self.saved[1])

    @precondition(lambda self: self.saved is not None)
    @rule(ranks=st.integers(1, 4), which=st.integers(0, KEEP))
    def reshard(self, ranks: int, which: int) -> None:
        """Continues one of the kept saves in a new job with another number of ranks."""
        self.count("load anew")
        kept = checkpoint.saves(self.directory)
        save = kept[which % len(kept)]
        state = self.states[read_manifest(self.directory, save)["extra"]]
        self.job = Ranks(ranks, self.policies)
        self.job.load(self.directory, state, save)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        """Loads the checkpoint into the running job."""
        self.count("load")
        self.job.load(self.directory, self.saved[1])
