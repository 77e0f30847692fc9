"""plan: chooses groups, schedule, micro-batches, wire and tier of a model for a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_fusedrec import ops
from tf_fusedrec.data.batches import num_samples
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, Pipelined, PipelinedModel, Schedule, SemiAsync, Sync
from tf_fusedrec.schedules.planned_calls import required_embeddings
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import KEY_BYTES, Forecast, Workload
from tf_fusedrec.schedules.planning.measure import lookups_of, measure

TOLERATED = ("stale_rows", "bfloat16_wire", "weight_sync")
MICRO_BATCHES = (2, 4, 8, 16)
NEARLY = 1.01  # a simpler choice is taken where its step is at most that many times as long


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choice for a cluster. `print(plan)` shows it as a table, with the runner-up.

    Attributes:
      cluster: The cluster that was planned for.
      forecasts: All choices that fit, the chosen one first, then by step time.
    """

    cluster: Cluster
    forecasts: tuple[Forecast, ...]

    @property
    def best(self) -> Forecast:
        """The chosen forecast."""
        return self.forecasts[0]

    @property
    def runner_up(self) -> Forecast | None:
        """The quickest of the other forecasts; None where only one choice fits."""
        return self.forecasts[1] if len(self.forecasts) > 1 else None

    @property
    def topology(self) -> Topology:
        """For fr.init(plan.topology) and FusedEmbedding(topology=plan.topology)."""
        return self.best.topology

    @property
    def schedule(self) -> Schedule:
        """For PipelinedModel(schedule=plan.schedule) or model.schedule = plan.schedule."""
        return self.best.schedule

    @property
    def wire_dtype(self) -> str | None:
        """For FusedEmbedding(wire_dtype=plan.wire_dtype)."""
        return self.best.wire_dtype

    @property
    def memory_budget_per_rank(self) -> int:
        """For Tier.memory_budget_per_rank, summed over tables; 0: all rows fit in memory."""
        return self.best.memory_budget_per_rank

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"cluster": self.cluster.to_dict(), "forecasts": [forecast.to_dict() for forecast in self.forecasts]}

    def __str__(self) -> str:
        shown = {"chosen": self.best, "runner-up": self.runner_up, "sync, one group": self._reference()}
        header = ("", "groups", "schedule", "wire", "ms per step", "MB sent per rank", "GB per rank")
        rows = [header, *(_row(name, forecast) for name, forecast in shown.items() if forecast is not None)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def _reference(self) -> Forecast | None:
        for forecast in self.forecasts:
            if (forecast.topology.groups, forecast.schedule, forecast.wire_dtype) == (1, Sync(), None):
                return forecast
        return None


def _row(name: str, forecast: Forecast) -> tuple[str, ...]:
    topology, sent = forecast.topology, forecast.embedding_bytes + forecast.replica_bytes + forecast.dense_bytes
    groups = str(topology.groups)
    if topology.groups > 1:
        every = f" every {topology.sync_every}" if topology.rule == "weight_sync" else ""
        groups += f", {topology.rule}{every}{', replicas together' if topology.replicas_together else ''}"
    wire = forecast.wire_dtype or "as the tables"
    memory = f"{forecast.memory_bytes_per_rank / 1e9:.3g}{' (with files)' if forecast.memory_budget_per_rank else ''}"
    return name, groups, str(forecast.schedule), wire, f"{1e3 * forecast.step_s:.3g}", f"{sent / 1e6:.3g}", memory


def plan(
    model: PipelinedModel,
    sample: Any,
    cluster: Cluster,
    *,
    rows: Mapping[str, int] | None = None,
    micro_batches: Sequence[int] | None = None,
    tolerate: Sequence[str] = (),
) -> Plan:
    """Chooses groups, schedule, micro-batches, wire and tier for a model on a cluster.

    Runs in one process, on any machine with the dense compute of a rank. It times two steps, of the sample and of
    its first half, and the ops of the sample's lookups. Then it replays a step of every choice (replay.py). A simpler
    choice wins where it is at most 1 % slower.

    The model stays as it was: its weights, tables, optimizer and metrics. The timed steps go forward and backward on
    given rows and update nothing. Lookups run on scratch tables, and weights that a forward pass changes are put back.

    Args:
      model: A compiled PipelinedModel with native tables.
      sample: A batch of one rank, as `data` of train_step: x, (x, y) or (x, y, sample_weight). Its ids and its size
        decide the choice, so take a typical one.
      cluster: The machines.
      rows: Expected rows of each table over all ranks, by name. A table that is not named has
        Limits.max_rows_per_rank on each rank, or else the rows that it has now.
      micro_batches: Numbers M of micro-batches to choose from, each from 2 to the samples of the batch; None: 2, 4, 8
        and 16, as far as they do not exceed it.
      tolerate: Allowed differences from "sync" other than the order of sums: "stale_rows" (SemiAsync, Pipelined(6)),
        "bfloat16_wire", "weight_sync" (groups that average every 1 or 8 steps).

    Returns:
      The plan.

    Raises:
      ValueError: an argument is out of its range; the cluster cannot hold the tables; the model is no PipelinedModel,
        has no loss, trains no table, or has lookups that are unknown or cannot be made ahead.
      RuntimeError: called on one of several ranks.
    """
    if collectives.size() > 1:
        raise RuntimeError(
            f"plan was called on rank {collectives.rank()} of {collectives.size()}, and it times one process. Use "
            "a program without horovodrun that prints the plan or saves plan.to_dict()."
        )
    if not isinstance(model, PipelinedModel):
        raise ValueError(
            f"plan got the model {model!r}, and schedules need a tf_fusedrec.schedules.PipelinedModel. Use "
            "a PipelinedModel, which takes the arguments of keras.Model."
        )
    if isinstance(tolerate, str) or not set(tolerate) <= set(TOLERATED):
        raise ValueError(f"tolerate must hold some of {TOLERATED}, got {tolerate!r}.")
    counts = _micro_batches(micro_batches, int(num_samples(sample)))
    table_bytes = _table_bytes(model, rows or {}, cluster)
    _check_memory(table_bytes, cluster)
    schedules = [schedule for schedule in _schedules(counts, tolerate) if _takes(model, schedule)]
    piece_counts = {1, 2, *(schedule.stages.pieces for schedule in schedules)} if int(num_samples(sample)) > 1 else {1}
    lookups = {count: lookups_of(model, sample, count) for count in sorted(piece_counts)}
    lookups.setdefault(2, lookups[1])
    if not lookups[1]:
        raise ValueError(
            f"plan got the model {model.name!r}, whose FusedEmbedding layers make no training lookups, and it weighs "
            "their exchanges. Use trainable = True for a layer with tables of this model."
        )
    workload = Workload(measure(model, sample, cluster.ranks), lookups, table_bytes)
    wire = required_embeddings(model)[0].internals.options.wire_dtype
    wires = list(dict.fromkeys([wire, "bfloat16"] if "bfloat16_wire" in tolerate else [wire]))
    forecasts = [
        forecast
        for topology in _topologies(model, cluster, tolerate)
        for wire in wires
        for schedule in schedules
        if (forecast := workload.forecast(cluster, topology, schedule, wire)) is not None
    ]
    least = min(forecast.step_s for forecast in forecasts)
    chosen = next(forecast for forecast in forecasts if forecast.step_s <= NEARLY * least)
    forecasts.remove(chosen)
    return Plan(cluster, (chosen, *sorted(forecasts, key=lambda forecast: forecast.step_s)))


def _micro_batches(counts: Sequence[int] | None, samples: int) -> list[int]:
    if counts is None:
        return [count for count in MICRO_BATCHES if count <= samples]
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or not 2 <= count <= samples:
            raise ValueError(
                f"micro_batches must hold ints from 2 to the {samples} samples of the sample, got {count!r}. Use "
                "fewer micro-batches, or a larger sample."
            )
    return list(counts)


def _schedules(counts: Sequence[int], tolerate: Sequence[str]) -> list[Schedule]:
    """The schedules to choose from, simpler ones first."""
    windows = [FrozenWindow(count) for count in counts]
    nested = [Nested(count) for count in counts]
    stale = [SemiAsync(), Pipelined(6)] if "stale_rows" in tolerate else []
    return [Sync(), *windows, DualBuffer(), Pipelined(3), *nested, *stale]


def _takes(model: PipelinedModel, schedule: Schedule) -> bool:
    try:
        schedule.check(model)
    except ValueError:
        return False
    return True


def _allows(embedding: FusedEmbedding, topology: Topology) -> bool:
    """Whether the layer can be made with this topology."""
    try:
        dataclasses.replace(embedding.internals.options, topology=topology).check_tables(embedding.tables)
    except ValueError:
        return False
    return True


def _topologies(model: PipelinedModel, cluster: Cluster, tolerate: Sequence[str]) -> Iterator[Topology]:
    specs = [table for embedding in required_embeddings(model) for table in embedding.tables]
    averages = all(not ops.check_tables([table.record(averaged=True)]) for table in specs)
    for topology in cluster.topologies():
        if not all(_allows(embedding, topology) for embedding in required_embeddings(model)):
            continue
        yield topology
        if topology.groups > 1 and averages and "weight_sync" in tolerate:
            for every in (1, 8):
                yield dataclasses.replace(topology, rule="weight_sync", sync_every=every)


def _table_bytes(model: PipelinedModel, rows: Mapping[str, int], cluster: Cluster) -> float:
    """Rows, slots and keys of all tables, once."""
    known: dict[str, float] = {}
    for embedding in required_embeddings(model):
        for group in embedding.internals.groups:
            for config in group.config.tables:
                count = rows.get(
                    config.name, config.limits.max_rows_per_rank * cluster.ranks or group.table.size(config.name)
                )
                known[config.name] = count * (group.table.row_bytes + KEY_BYTES)
    strangers = sorted(set(rows) - set(known))
    if strangers:
        raise ValueError(f"rows must name tables of the model, {sorted(known)}, got {strangers}.")
    for name, count in rows.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"rows[{name!r}] must be an int >= 0, got {count!r}.")
    return sum(known.values())


def _check_memory(table_bytes: float, cluster: Cluster) -> None:
    each = table_bytes / cluster.ranks
    if each > cluster.memory_bytes_per_rank + cluster.file_bytes_per_rank:
        fitting = -int(-table_bytes // (cluster.memory_bytes_per_rank + cluster.file_bytes_per_rank))
        raise ValueError(
            f"cluster has {cluster.memory_bytes_per_rank / 1e9:.3g} GB of memory and "
            f"{cluster.file_bytes_per_rank / 1e9:.3g} GB of files per rank. "
            f"One replica of the tables needs {each / 1e9:.3g} GB on each of {cluster.ranks} ranks. "
            f"Use {fitting} ranks or more, a larger memory_bytes_per_rank, or file_bytes_per_rank for a second tier."
        )
