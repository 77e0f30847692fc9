"""The variants of benchmarks.overlap on four ranks, and their figures: ratios, speeds, floors and fields.

A floor is the shortest step that the dependencies of a schedule allow, from parts that were measured alone.

Letters, all in ms of one step: i, r, g, d are the exchanges of ids, rows, gradients and dense gradients; p and s are
those among the replicas of a shard, of the sums of gradients and of their ids; a is the average of replicas; l the
lookup; c the compute; k the number of dense layers. e = 1 / (2 M - 2) is the part of the samples in the first and in
the last of M micro-batches, 1 for M = 1. The dense gradients of the first layer, d / k, come last, with the last
gradients of rows. No row waits for s. Work of the host counts nothing, so every step is longer than its floor.

    sync, Pipelined(2)       i + l + w
    FrozenWindow(M)          i + l + w,     w = e r + max(c, (1 - e)(r + g + p) + s + d - d/k) + e (g + p) + d/k + a
    DualBuffer, Nested(M)    max(i + l, w)
    Pipelined(3)             max(i, l + w)
    SemiAsync, Pipelined(6)  max(c + d/k, g + p + l + r + a, i + s + r + g + p + d + a)

With M = 1, w = r + max(c, s) + g + p + d/k + a.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.overlap.device import DEVICE, MEMORY, Record, Span
from tf_fusedrec.callbacks.timeline_events import seconds, union, without
from tf_fusedrec.data.batches import piece_bounds
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


@dataclasses.dataclass(frozen=True)
class Parts:
    """Measured parts of one step, in ms."""

    ids: float = 0.0
    rows: float = 0.0
    gradients: float = 0.0
    dense: float = 0.0
    average: float = 0.0
    replicas: float = 0.0  # sums of gradients among the replicas of a shard
    replica_ids: float = 0.0  # the ids of these sums
    other: float = 0.0  # numbers that ranks agree on, such as the weight of a loss; a floor leaves them out

    @property
    def exchange(self) -> float:
        return sum(dataclasses.astuple(self))


PARTS = tuple(field.name for field in dataclasses.fields(Parts))


def kind_of(name: str) -> str:
    """Returns the field of Parts that a collective counts to, by its name.

    Examples: "sync.group.0.rows" -> "rows"; "2d.group.0.replicas.sums" -> "replicas".
    """
    if name.startswith("dense_gradients_"):
        return "dense"
    if ".average." in name:
        return "average"
    *_, before, last = ("", *name.split("."))
    if before == "replicas":
        return "replicas" if last in ("gradients", "sums") else "replica_ids"
    return last if last in ("ids", "rows", "gradients") else "other"


def is_exchange(name: str) -> bool:
    return name not in (DEVICE, MEMORY)


def parts_of(record: Record) -> Parts:
    """Returns the time of each kind of exchange. Exchanges that run together share the time by what they send."""
    exchanges: list[tuple[Span, str, float]] = []
    for name in filter(is_exchange, record.spans):
        kind = kind_of(name)
        # A sum over ranks sends its numbers twice. An exchange that sends nothing is a wait for another rank.
        weight = max(1.0, record.sent[name] * (2 if kind == "dense" else 1))
        exchanges += [(span, kind, weight) for span in record.spans[name]]
    found = dict.fromkeys(PARTS, 0.0)
    for begin, end in itertools.pairwise(sorted({moment for span, _, _ in exchanges for moment in span})):
        running = [(kind, weight) for span, kind, weight in exchanges if span[0] <= begin and end <= span[1]]
        total = sum(weight for _, weight in running)
        for kind, weight in running:
            found[kind] += 1e3 * (end - begin) * weight / total
    return Parts(**found)


def exposed_ms(record: Record) -> float:
    """Returns the time in which some exchange runs and the device stream does not."""
    exchanges = union(span for name in filter(is_exchange, record.spans) for span in record.spans[name])
    return 1e3 * seconds(without(exchanges, union(record.spans.get(DEVICE, ()))))


def free_ms(record: Record, begin: float, end: float) -> float:
    """Returns the time between `begin` and `end` in which no exchange and no stream runs."""
    return 1e3 * seconds(without([(begin, end)], union(span for spans in record.spans.values() for span in spans)))


def floor_ms(schedule: Schedule, parts: Parts, *, compute: float, lookup: float, layers: int) -> float:
    stages = schedule.stages
    i, r, a, ids = parts.ids, parts.rows, parts.average, parts.replica_ids
    back = parts.gradients + parts.replicas
    c, last = compute, parts.dense / layers
    if stages.return_rows:
        return max(c + last, back + lookup + r + a, i + ids + r + back + parts.dense + a)
    pieces = stages.pieces
    if pieces == 1:
        window = r + max(c, ids) + back + last + a
    else:
        e = piece_bounds(1 << 20, pieces)[1] / (1 << 20)
        window = e * r + max(c, (1 - e) * (r + back) + ids + parts.dense - last) + e * back + last + a
    if stages.look_ahead:
        return max(i + lookup, window)
    if stages.send_ids:
        return max(i, lookup + window)
    return i + lookup + window


def case(phase: Mapping[str, Any], answer: Mapping[str, Any], layers: int, ranks: int) -> dict[str, Any]:
    variants: dict[str, dict[str, float]] = {}
    parts = {name: Parts(**{part: turns["bare"][part] for part in PARTS}) for name, turns in answer["variants"].items()}
    for name, turns in answer["variants"].items():
        full, exchange = turns["full"], parts[name].exchange
        floor = floor_ms(
            VARIANTS[name].schedule, parts[name], compute=full["compute"], lookup=full["lookup"], layers=layers
        )
        variants[name] = {
            "ms": full["step"], "floor_ms": floor, "floor_ratio": full["step"] / floor, "exposed_ms": full["exposed"],
            "exchange_alone_ms": exchange, "exposed_ratio": full["exposed"] / exchange if exchange else 0.0,
            **{f"{part}_ms": full[part] for part in ("compute", "lookup", "free", "cpu")},
            "cores": ranks * full["cpu"] / full["step"],
        }  # fmt: skip
    for name, figures in variants.items():
        if VARIANTS[name].baseline in variants:
            figures["speedup"] = variants[VARIANTS[name].baseline]["ms"] / figures["ms"]
    sync = variants["sync"]
    return {
        "rate": phase["rate"], "device_cores": 1 / answer["device"], "ranks": ranks,
        "ratio": sync["compute_ms"] / sync["exchange_alone_ms"] if sync["exchange_alone_ms"] else None,
        "variants": variants, "parts": {name: dataclasses.asdict(one) for name, one in parts.items()},
    }  # fmt: skip


def fields(one: Mapping[str, Any] | None, names: Iterable[str], suffix: str = "") -> dict[str, float | None]:
    """Returns exposed_ratio and speedup of every variant of a case, and the largest floor_ratio. None: not measured."""
    variants = {} if one is None else one["variants"]
    found = {
        f"{figure}_{name}{suffix}": variants.get(name, {}).get(figure)
        for figure in ("exposed_ratio", "speedup")
        for name in names
    }
    worst = max((figures["floor_ratio"] for figures in variants.values()), default=None)
    return {**found, f"floor_ratio_worst{suffix}": worst}


def show(one: Mapping[str, Any]) -> None:
    """Prints a case: a variant per line."""
    where = "one host" if one["rate"] is None else f"two hosts, {one['rate']} between them"
    device = f"a device as fast as {one['device_cores']:.3g} of our cores, which computes nothing"
    title = f"{one['ranks']} ranks, {where}; {device}; compute : exchange {one['ratio']}"
    harness.print_table(title, [{"variant": name, **figures} for name, figures in one["variants"].items()])
    parts = [{"variant": name, **parts} for name, parts in one["parts"].items()]
    harness.print_table("exchange alone, ms by kind", parts)
