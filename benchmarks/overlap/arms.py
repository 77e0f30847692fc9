"""The arms of benchmarks.overlap on four ranks: schedule, groups, wire, batches and the share of the lookups."""

from __future__ import annotations

from typing import Any, NamedTuple

import tf_fusedrec as fr
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, Schedule, SemiAsync, Sync

EXACT = 1e-3  # sums in another order, amplified by a few training steps
NARROW = 1e-2  # numbers that travelled as bfloat16
STALE = 5e-2  # rows that lack one update
APART = 0.3  # groups that train apart: a row that one group has trained makes half of its step

ONE = fr.Topology()


class Arm(NamedTuple):
    """One way to train. Arms of one model differ in the time of the lookups alone."""

    schedule: Schedule
    topology: fr.Topology = ONE
    wire: str | None = None
    clustered: bool = False
    lookup: float = 0.0  # part of the step of sync that its lookups take
    model: str = ""  # the arm whose model this one runs; "": its own
    steps: int = 1  # steps of one turn, of which the mean counts
    baseline: str = "sync"
    tolerance: float = EXACT  # of the loss against sync, relative

    @property
    def micro_batches(self) -> int:
        return getattr(self.schedule, "micro_batches", 1)

    def layer(self) -> dict[str, Any]:
        """Returns its options of FusedEmbedding."""
        return {"topology": self.topology, "wire_dtype": self.wire}


def _groups(**options: Any) -> fr.Topology:
    return fr.Topology(groups=2, **options)


ARMS = {
    "sync": Arm(Sync()),
    "frozen_M4": Arm(FrozenWindow(4)),
    "frozen_M8": Arm(FrozenWindow(8)),
    "frozen_M16": Arm(FrozenWindow(16)),
    "dual": Arm(DualBuffer()),
    "nested_M4": Arm(Nested(4)),
    "nested_M8": Arm(Nested(8)),
    "nested_M16": Arm(Nested(16)),
    "semi_async": Arm(SemiAsync(), tolerance=STALE),
    "pipelined3": Arm(Pipelined(3)),
    "pipelined6": Arm(Pipelined(6), tolerance=STALE),
    "nested_clustered": Arm(Nested(8), clustered=True),
    "sync_bf16": Arm(Sync(), wire="bfloat16", tolerance=NARROW),
    "nested_bf16": Arm(Nested(8), wire="bfloat16", tolerance=NARROW),
    "2d": Arm(Sync(), _groups()),
    "2d_weight_1": Arm(Sync(), _groups(rule="weight_sync"), tolerance=APART),
    "2d_weight_8": Arm(Sync(), _groups(rule="weight_sync", sync_every=8), steps=8, tolerance=APART),
    "nested_2d": Arm(Nested(8), _groups()),
    "nested_2d_weight_8": Arm(Nested(8), _groups(rule="weight_sync", sync_every=8), steps=8, tolerance=APART),
    "sync_lookup25": Arm(Sync(), lookup=0.25, model="sync", baseline="sync_lookup25"),
    "dual_lookup25": Arm(DualBuffer(), lookup=0.25, model="dual", baseline="sync_lookup25"),
    "sync_lookup45": Arm(Sync(), lookup=0.45, model="sync", baseline="sync_lookup45"),
    "dual_lookup45": Arm(DualBuffer(), lookup=0.45, model="dual", baseline="sync_lookup45"),
    "nested_lookup45": Arm(Nested(8), lookup=0.45, model="nested_M8", baseline="sync_lookup45"),
}


def topologies() -> list[fr.Topology]:
    """Returns the topologies of all arms, for fr.init."""
    return list(dict.fromkeys(arm.topology for arm in ARMS.values()))
