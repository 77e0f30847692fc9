"""The forecast of one choice of groups, schedule and wire: seconds of a step, bytes and memory of a rank.

A batch of k ranks is taken to hold U k^b distinct ids (Heaps' law). U is the sample's number of distinct ids, and b
follows from its two halves. Hashing is taken to spread ids evenly over owners. The dense optimizer, the input and the
busiest owner's surplus are left out. Pooled features are taken to travel as rows, the most that they cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_fusedrec.exchange.routing import by_ranges
from tf_fusedrec.exchange.topology import Topology
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.measure import Lookup, Measured
from tf_fusedrec.schedules.planning.replay import Piece, StepCosts, shares, step_s
from tf_fusedrec.schedules.schedule import Schedule, serialize

ID_BYTES = 8
KEY_BYTES = 28  # of a row's key in memory: custom_ops/hash_table/cpu/rows/key_index.h


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One choice and what it costs a rank.

    Attributes:
      topology, schedule, wire_dtype: The choice; wire_dtype as FusedEmbedding takes it.
      memory_budget_per_rank: Bytes of rows in memory, if the others are in files; 0: all rows in memory.
      step_s: Seconds of one step.
      embedding_bytes: Ids, rows and gradients that a rank sends to the other ranks of its group in one step, the mean
        over ranks. EmbeddingMetrics counts the same.
      replica_bytes: Bytes that a rank sends to the replicas of its shard in one step, the mean over steps. The ids that
        groups have in common are estimated.
      dense_bytes: Bytes of dense gradients that a rank sends in one step.
      memory_bytes_per_rank: Rows, slots and keys of a rank.
    """

    topology: Topology
    schedule: Schedule
    wire_dtype: str | None
    memory_budget_per_rank: int
    step_s: float
    embedding_bytes: float
    replica_bytes: float
    dense_bytes: float
    memory_bytes_per_rank: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "topology": self.topology.to_dict(), "schedule": serialize(self.schedule)}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A job as a sample and its timed steps describe it.

    Args:
      measured: The times of the parts of a step.
      lookups: The lookups of a step by number of micro-batches, 1 and 2 among them.
      table_bytes: Rows, slots and keys of one replica of all tables, over all its ranks.
    """

    measured: Measured
    lookups: dict[int, list[Lookup]]
    table_bytes: float

    @property
    def growth(self) -> float:
        """b in (0, 1]: k batches hold k^b times the distinct ids of one."""
        batch, halves = (sum(sum(lookup.unique) for lookup in self.lookups[count]) for count in (1, 2))
        return 1.0 if not halves else min(max(math.log2(max(2 * batch / halves, 1.0)), 0.05), 1.0)

    def forecast(
        self, cluster: Cluster, topology: Topology, schedule: Schedule, wire_dtype: str | None
    ) -> Forecast | None:
        """Returns the forecast of a choice, or None where a rank cannot hold its part of the tables."""
        memory = self.table_bytes * topology.groups / cluster.ranks
        in_files = max(memory - cluster.memory_bytes_per_rank, 0.0)
        if in_files > cluster.file_bytes_per_rank:
            return None
        traffic = _traffic(self.lookups[schedule.stages.pieces], cluster, topology, self.growth, wire_dtype)
        costs = self._costs(cluster, topology, traffic, in_files / memory if memory else 0.0)
        all_reduced = 2 * (cluster.ranks - 1) / cluster.ranks * self.measured.dense_bytes
        return Forecast(
            topology, schedule, wire_dtype, int(cluster.memory_bytes_per_rank) if in_files else 0,
            step_s(costs, schedule), traffic.embedding, traffic.among_replicas, all_reduced, memory,
        )  # fmt: skip

    def _costs(self, cluster: Cluster, topology: Topology, traffic: _Traffic, in_files: float) -> StepCosts:
        measured, (groups, replicas) = self.measured, topology.sets(cluster.ranks)
        # The part of the compute time that grows with the samples, and the fixed part.
        per_batch = min(max(2 * (measured.compute - measured.half_compute), 0.0), measured.compute)
        fixed = measured.compute - per_batch
        missed = sum(sum(lookup.unique) * lookup.state_bytes for lookup in self.lookups[1]) * in_files
        lookup = measured.lookup + missed / cluster.file_bytes_per_s
        shares_gradients = topology.groups > 1 and topology.rule == "gradient_sync"

        def all_to_alls_s(members: tuple[int, ...], sent_bytes: Sequence[float]) -> float:
            return sum(cluster.all_to_all_s(members, sent) for sent in sent_bytes)

        return StepCosts(
            prepare=measured.prepare,
            ids=cluster.all_to_all_s(groups[0], traffic.ids),
            lookup=lookup,
            pieces=tuple(
                Piece(
                    fixed + per_batch * share,
                    all_to_alls_s(groups[0], rows),
                    all_to_alls_s(groups[0], gradients),
                    all_to_alls_s(replicas[0], sums) if shares_gradients else 0.0,
                )
                for share, rows, gradients, sums in zip(
                    shares(measured.samples, len(traffic.rows)), traffic.rows, traffic.gradients, traffic.replica_sums
                )
            ),
            update=measured.update * (traffic.union if shares_gradients else 1.0),
            dense=cluster.all_reduce_s(tuple(range(cluster.ranks)), measured.dense_bytes),
            replica_ids=all_to_alls_s(replicas[0], traffic.replica_ids) if shares_gradients else 0.0,
            average=cluster.all_reduce_s(replicas[0], traffic.averaged) / topology.sync_every
            if traffic.averaged
            else 0.0,
            refresh=lookup * max(2 - 2**self.growth, 0.0),  # the part of a batch's ids that the batch before had
            shared_cores=not cluster.compute_on_device,
        )


class _Traffic(NamedTuple):
    """Bytes that one rank sends in one step."""

    union: float  # distinct ids of all ranks at one shard over the ids in one rank's batch
    ids: float  # of all micro-batches, with a header per table and other rank, and their marks
    rows: list[list[float]]  # by micro-batch and lookup: each row once, with the first micro-batch that has it
    gradients: list[list[float]]  # by micro-batch and lookup: each sum once, with the last micro-batch that has its row
    replica_ids: list[float]  # by exchange among replicas, headers included
    replica_sums: list[list[float]]  # by micro-batch, of all lookups and exchanges among replicas
    averaged: float  # 32-bit rows and slots in one average of replicas; 0 without the rule "weight_sync"
    among_replicas: float  # the mean over steps of all bytes among replicas

    @property
    def embedding(self) -> float:
        return self.ids + sum(map(sum, self.rows)) + sum(map(sum, self.gradients))


def _traffic(
    lookups: Sequence[Lookup], cluster: Cluster, topology: Topology, growth: float, wire_dtype: str | None
) -> _Traffic:
    """The bytes of a step with these lookups, which are cut into the micro-batches of a schedule."""
    groups, replicas = topology.sets(cluster.ranks)
    n, copies, micro_batches = len(groups[0]), len(replicas[0]), len(lookups[0].new)
    union = (n * copies) ** growth / n
    distinct = float(sum(sum(lookup.new) for lookup in lookups))
    away = (n - 1) / n  # part of the ids with another rank as owner
    headers = sum(ID_BYTES * lookup.tables * micro_batches for lookup in lookups)  # for one other rank
    marks = 0.0
    if micro_batches > 1:  # custom_ops/window_rows/window_rows.h says how marks for one owner are packed into words
        per_word = 64 // (micro_batches - 1).bit_length()
        marks = sum(ID_BYTES * (1 + sum(lookup.new) / n / per_word) for lookup in lookups)
    elif topology.groups == 1 or topology.rule != "gradient_sync":  # headers of custom_ops/partial_sums
        marks = ID_BYTES * sum(lookup.pools for lookup in lookups)
    row_bytes = [lookup.dim * min(lookup.number_bytes, 2 if wire_dtype else 4) for lookup in lookups]

    def by_micro_batch(counts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[count * away * size for size, count in zip(row_bytes, piece)] for piece in zip(*counts)]

    # Rows that a rank sends to its replicas in each exchange, over the ids of a batch. exchange/gradient_sync.py has
    # the rule: u distinct ids in each group and U in all at one shard make u rows with two groups. More groups make
    # (C - 1) / C u rows to the ranges, then (C - 1) / C U rows of their sums.
    to_others, in_group = (copies - 1) / copies, n**growth / n
    exchanges = (to_others * in_group, to_others * union) if by_ranges(copies) else ((copies - 1) * in_group,)
    replica_ids = [ID_BYTES * distinct * part + headers * (copies - 1) for part in exchanges]
    replica_sums = [
        [lookup.ended[piece] * size * part for lookup, size in zip(lookups, row_bytes) for part in exchanges]
        for piece in range(micro_batches)
    ]
    averaged = among_replicas = 0.0
    if topology.groups > 1 and topology.rule == "weight_sync":
        trained = (n * copies * topology.sync_every) ** growth / n
        averaged = trained * sum(sum(lookup.new) * lookup.state_bytes for lookup in lookups)
        among_replicas = 2 * to_others * averaged / topology.sync_every
    elif topology.groups > 1:
        among_replicas = sum(replica_ids) + sum(map(sum, replica_sums))
    return _Traffic(
        union=union,
        ids=ID_BYTES * distinct * away + (headers + marks) * (n - 1),
        rows=by_micro_batch([lookup.new for lookup in lookups]),
        gradients=by_micro_batch([lookup.ended for lookup in lookups]),
        replica_ids=replica_ids,
        replica_sums=replica_sums,
        averaged=averaged,
        among_replicas=among_replicas,
    )
