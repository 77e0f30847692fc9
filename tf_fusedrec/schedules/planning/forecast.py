"""The forecast of one choice of groups, schedule and wire: seconds of a step, bytes and memory of a rank.

A batch of k ranks is taken to hold U k^b distinct ids (Heaps' law). U is the sample's number of distinct ids, and b
comes from its two halves. Hashing is taken to spread ids evenly over owners. The dense optimizer, the input and the
busiest owner's surplus are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tf_fusedrec.exchange.gradient_sync import by_ranges
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
      memory_budget: Bytes of rows in memory, where the others lie in files; 0: all rows in memory.
      step_s: Seconds of one step.
      embedding_bytes: Ids, rows and gradients that a rank sends to the other ranks of its group in one step, the mean
        over ranks. EmbeddingMetrics and `FusedEmbedding.lookups[i].traffic` count the same.
      replica_bytes: Bytes that a rank sends to the replicas of its shard in one step, the mean over steps. The ids that
        groups have in common are estimated.
      dense_bytes: Bytes of dense gradients that a rank sends in one step.
      memory_bytes: Rows, slots and keys that a rank holds.
    """

    topology: Topology
    schedule: Schedule
    wire_dtype: str | None
    memory_budget: int
    step_s: float
    embedding_bytes: float
    replica_bytes: float
    dense_bytes: float
    memory_bytes: float

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
        whole, halves = (sum(sum(one.unique) for one in self.lookups[count]) for count in (1, 2))
        return 1.0 if not halves else min(max(math.log2(max(2 * whole / halves, 1.0)), 0.05), 1.0)

    def forecast(
        self, cluster: Cluster, topology: Topology, schedule: Schedule, wire_dtype: str | None
    ) -> Forecast | None:
        """Returns the forecast of a choice, or None where a rank cannot hold its part of the tables."""
        memory = self.table_bytes * topology.groups / cluster.ranks
        in_files = max(memory - cluster.memory_bytes, 0.0)
        if in_files > cluster.file_bytes:
            return None
        lookups = self.lookups[schedule.stages.pieces]
        groups, replicas = topology.sets(cluster.ranks)
        traffic = _Traffic(lookups, len(groups[0]), len(replicas[0]), self.growth, wire_dtype)
        costs = self._costs(cluster, topology, traffic, in_files / memory if memory else 0.0)
        all_reduced = 2 * (cluster.ranks - 1) / cluster.ranks * self.measured.dense_bytes
        return Forecast(
            topology, schedule, wire_dtype, int(cluster.memory_bytes) if in_files else 0, step_s(costs, schedule),
            traffic.embedding_bytes, traffic.replica_bytes(topology), all_reduced, memory,
        )  # fmt: skip

    def _costs(self, cluster: Cluster, topology: Topology, traffic: _Traffic, in_files: float) -> StepCosts:
        measured, (groups, replicas) = self.measured, topology.sets(cluster.ranks)
        group, replica = groups[0], replicas[0]
        of_batch = measured.compute - measured.half_compute
        per_batch = min(max(2 * of_batch, 0.0), measured.compute)  # the part of the time that grows with the samples
        fixed = measured.compute - per_batch
        parts = shares(measured.samples, traffic.micro_batches)
        missed = sum(sum(one.unique) * one.state_bytes for one in self.lookups[1]) * in_files
        lookup = measured.lookup + missed / cluster.file_bytes_per_s
        shared = topology.groups > 1 and topology.rule == "gradient_sync"
        return StepCosts(
            prepare=measured.prepare,
            ids=cluster.all_to_all_s(group, traffic.id_bytes),
            lookup=lookup,
            pieces=tuple(
                Piece(
                    fixed + per_batch * part,
                    _together_s(cluster, group, row_bytes),
                    _together_s(cluster, group, gradient_bytes),
                    _together_s(cluster, replica, sums) if shared else 0.0,
                )
                for part, row_bytes, gradient_bytes, sums in zip(
                    parts, traffic.row_bytes, traffic.gradient_bytes, traffic.replica_row_bytes
                )
            ),
            update=measured.update * (traffic.union if shared else 1.0),
            dense=cluster.all_reduce_s(tuple(range(cluster.ranks)), measured.dense_bytes),
            replica_ids=_together_s(cluster, replica, traffic.replica_id_bytes) if shared else 0.0,
            average=_average_s(cluster, topology, traffic, replica),
            refresh=lookup * max(2 - 2**self.growth, 0.0),  # the part of a batch's ids that the batch before held
            shared_cores=not cluster.compute_on_device,
        )


class _Traffic:
    """Bytes that one rank sends in one step.

    Args:
      lookups: The lookups of a step, for its number of micro-batches.
      group: n, ranks of a group.
      replicas: C, replicas of a shard.
      growth: See Workload.growth.
      wire_dtype: "bfloat16", "float16" or None.
    """

    def __init__(self, lookups: Sequence[Lookup], group: int, replicas: int, growth: float, wire_dtype: str | None):
        self.lookups, self._group, self._replicas, self._growth = lookups, group, replicas, growth
        self._widest = 2 if wire_dtype else 4

    @property
    def micro_batches(self) -> int:
        return len(self.lookups[0].new)

    @property
    def union(self) -> float:
        """Distinct ids of all ranks at one shard over the ids that one rank's batch holds."""
        return (self._group * self._replicas) ** self._growth / self._group

    @property
    def _distinct(self) -> float:
        return float(sum(sum(one.new) for one in self.lookups))

    @property
    def _away(self) -> float:
        """Part of the ids whose owner is another rank."""
        return (self._group - 1) / self._group

    @property
    def id_bytes(self) -> float:
        """Bytes of the ids of all micro-batches, with a header per table and other rank, and of their marks."""
        headers = sum(ID_BYTES * one.tables * (self._group - 1) * self.micro_batches for one in self.lookups)
        marks = sum(self._mark_words(one) for one in self.lookups) * ID_BYTES * (self._group - 1)
        return ID_BYTES * self._distinct * self._away + headers + marks

    def _mark_words(self, lookup: Lookup) -> float:
        """Words of the marks for one owner: custom_ops/window_rows/window_rows.h says how they are packed."""
        if self.micro_batches == 1:
            return 0.0
        per_word = 64 // (self.micro_batches - 1).bit_length()
        return 1 + sum(lookup.new) / self._group / per_word

    @property
    def row_bytes(self) -> list[list[float]]:
        """Bytes of the rows of each lookup by micro-batch: each row once, with the first that holds it."""
        return self._of_pieces([one.new for one in self.lookups])

    @property
    def gradient_bytes(self) -> list[list[float]]:
        """Bytes of the gradients of each lookup by micro-batch: each sum once, with the last that holds its row."""
        return self._of_pieces([one.ended for one in self.lookups])

    def _of_pieces(self, counts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            [count * self._away * self._row(one) for one, count in zip(self.lookups, of_piece)]
            for of_piece in zip(*counts)
        ]

    def _row(self, lookup: Lookup) -> int:
        return lookup.dim * min(lookup.number_bytes, self._widest)

    @property
    def embedding_bytes(self) -> float:
        return self.id_bytes + sum(map(sum, self.row_bytes)) + sum(map(sum, self.gradient_bytes))

    @property
    def _among_replicas(self) -> tuple[float, ...]:
        """Rows that a rank sends to its replicas in each exchange, over the ids of a batch.

        exchange/gradient_sync.py has the rule: u distinct ids in each group and U in all at one shard make u rows with
        two groups. More groups make (C - 1) / C u rows to the ranges, then (C - 1) / C U rows of their sums.
        """
        of_group = self._group**self._growth / self._group
        if not by_ranges(self._replicas):
            return ((self._replicas - 1) * of_group,)
        others = (self._replicas - 1) / self._replicas
        return others * of_group, others * self.union

    @property
    def replica_id_bytes(self) -> list[float]:
        """Bytes of each exchange of ids among replicas, headers included."""
        headers = sum(ID_BYTES * one.tables * (self._replicas - 1) * self.micro_batches for one in self.lookups)
        return [ID_BYTES * self._distinct * part + headers for part in self._among_replicas]

    @property
    def replica_row_bytes(self) -> list[list[float]]:
        """Bytes of the exchanges of gradient sums of each lookup, by micro-batch."""
        return [
            [one.ended[piece] * self._row(one) * part for one in self.lookups for part in self._among_replicas]
            for piece in range(self.micro_batches)
        ]

    def averaged_bytes(self, steps: int) -> float:
        """Bytes of one average of replicas: the 32-bit rows and slots that groups have trained in these steps."""
        union = (self._group * self._replicas * steps) ** self._growth / self._group
        return union * sum(sum(one.new) * one.state_bytes for one in self.lookups)

    def replica_bytes(self, topology: Topology) -> float:
        if topology.groups == 1:
            return 0.0
        if topology.rule == "gradient_sync":
            return sum(self.replica_id_bytes) + sum(sum(piece) for piece in self.replica_row_bytes)
        sent = 2 * (self._replicas - 1) / self._replicas * self.averaged_bytes(topology.sync_every)
        return sent / topology.sync_every


def _together_s(cluster: Cluster, members: tuple[int, ...], sent_bytes: Sequence[float]) -> float:
    """Seconds of several all-to-alls, one after another."""
    return sum(cluster.all_to_all_s(members, one) for one in sent_bytes)


def _average_s(cluster: Cluster, topology: Topology, traffic: _Traffic, replica: tuple[int, ...]) -> float:
    """Seconds of the averages of replicas, per step."""
    if topology.groups == 1 or topology.rule != "weight_sync":
        return 0.0
    return cluster.all_reduce_s(replica, traffic.averaged_bytes(topology.sync_every)) / topology.sync_every
