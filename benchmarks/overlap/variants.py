"""The variants of benchmarks.overlap on four ranks: schedule, groups, wire, batches and the share of the lookups."""

from __future__ import annotations

from typing import Any, NamedTuple

import tf_fusedrec as fr
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, Schedule, SemiAsync, Sync

EXACT = 1e-3  # sums in another order, amplified by a few training steps
NARROW = 1e-2  # numbers that travelled as bfloat16
STALE = 5e-2  # rows that lack one update
APART = 0.3  # groups that train apart: a row that one group has trained makes half of its step

ONE = fr.Topology()


class Variant(NamedTuple):
    """One way to train. Variants of one model differ in the time of the lookups alone."""

    schedule: Schedule
    topology: fr.Topology = ONE
    wire: str | None = None
    clustered: bool = False
    lookup: float = 0.0  # part of the step of sync that its lookups take
    model: str = ""  # the variant whose model this one runs; "": its own
    steps: int = 1  # steps of one turn, of which the mean counts
    baseline: str = "sync"
    tolerance: float = EXACT  # of the loss against sync, relative

    @property
    def micro_batches(self) -> int:
        return self.schedule.stages.pieces

    def layer(self) -> dict[str, Any]:
        """Returns its options of FusedEmbedding."""
        return {"topology": self.topology, "wire_dtype": self.wire}


def _groups(**options: Any) -> fr.Topology:
    return fr.Topology(groups=2, **options)


VARIANTS = {
    "sync": Variant(Sync()),
    "frozen_M4": Variant(FrozenWindow(4)),
    "frozen_M8": Variant(FrozenWindow(8)),
    "frozen_M16": Variant(FrozenWindow(16)),
    "dual": Variant(DualBuffer()),
    "nested_M4": Variant(Nested(4)),
    "nested_M8": Variant(Nested(8)),
    "nested_M16": Variant(Nested(16)),
    "semi_async": Variant(SemiAsync(), tolerance=STALE),
    "pipelined3": Variant(Pipelined(3)),
    "pipelined6": Variant(Pipelined(6), tolerance=STALE),
    "nested_clustered": Variant(Nested(8), clustered=True),
    "sync_bf16": Variant(Sync(), wire="bfloat16", tolerance=NARROW),
    "nested_bf16": Variant(Nested(8), wire="bfloat16", tolerance=NARROW),
    "2d": Variant(Sync(), _groups()),
    "2d_weight_1": Variant(Sync(), _groups(rule="weight_sync"), tolerance=APART),
    "2d_weight_8": Variant(Sync(), _groups(rule="weight_sync", sync_every=8), steps=8, tolerance=APART),
    "nested_2d": Variant(Nested(8), _groups()),
    "nested_2d_weight_8": Variant(Nested(8), _groups(rule="weight_sync", sync_every=8), steps=8, tolerance=APART),
    "sync_lookup25": Variant(Sync(), lookup=0.25, model="sync", baseline="sync_lookup25"),
    "dual_lookup25": Variant(DualBuffer(), lookup=0.25, model="dual", baseline="sync_lookup25"),
    "sync_lookup45": Variant(Sync(), lookup=0.45, model="sync", baseline="sync_lookup45"),
    "dual_lookup45": Variant(DualBuffer(), lookup=0.45, model="dual", baseline="sync_lookup45"),
    "nested_lookup45": Variant(Nested(8), lookup=0.45, model="nested_M8", baseline="sync_lookup45"),
}
