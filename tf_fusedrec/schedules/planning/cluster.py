"""Cluster: what a planner knows about the machines, and how long collectives take on them."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from tf_fusedrec.exchange.topology import Topology


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines that a model will train on.

    Args:
      ranks: 1 <= R <= 65,536, processes of the job.
      memory_bytes_per_rank: > 0, host or device memory of one rank for rows and their optimizer slots.
      ranks_per_host: ranks on one host; it must divide R.
      inside_bytes_per_s: > 0, bandwidth of one rank to the other ranks of its host.
      between_bytes_per_s: > 0, bandwidth of one host to all other hosts, in one direction. Its ranks share it.
      latency_s: >= 0, seconds that one message of a collective takes beside its bytes. An all-to-all among n ranks
        sends n - 1 messages one after another.
      file_bytes_per_rank: >= 0, disk of one rank for rows beyond memory_bytes_per_rank
        (Tier.memory_budget_per_rank); 0: no second tier.
      file_bytes_per_s: > 0, rate of reads of rows from that disk.
      compute_on_device: whether dense compute leaves the cores of the host free, as a GPU does. False: lookups and
        dense compute take turns on the same cores.

    Raises:
      ValueError: a field is out of its range, or ranks_per_host does not divide ranks.

    Examples:
      >>> cluster = fr.Cluster(ranks=8, memory_bytes_per_rank=16e9, ranks_per_host=4)
      >>> plan = fr.plan(model, (x, y), cluster, micro_batches=[2])
      >>> plan.topology.groups in (1, 2, 4, 8)  # it depends on measured times
      True
    """

    ranks: int
    memory_bytes_per_rank: float
    ranks_per_host: int = 1
    inside_bytes_per_s: float = 10e9
    between_bytes_per_s: float = 1.25e9
    latency_s: float = 1e-4
    file_bytes_per_rank: float = 0.0
    file_bytes_per_s: float = 1e9
    compute_on_device: bool = True

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Cluster.{name} must be an int >= 1, got {value!r}.")
        if self.ranks > 65536:  # as rank_partition, which the replay of a step calls
            raise ValueError(f"Cluster.ranks must be at most 65,536, got {self.ranks}. Use fewer ranks.")
        if self.ranks % self.ranks_per_host:
            fitting = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            raise ValueError(
                f"Cluster.ranks_per_host must divide Cluster.ranks, which is {self.ranks}, got {self.ranks_per_host}. "
                f"Use one of {fitting}, or another number of ranks."
            )
        for name in ("memory_bytes_per_rank", "inside_bytes_per_s", "between_bytes_per_s", "file_bytes_per_s"):
            self._require(name, "> 0", least=0.0, open_end=True)
        for name in ("latency_s", "file_bytes_per_rank"):
            self._require(name, ">= 0", least=0.0, open_end=False)

    def _require(self, name: str, bounds: str, *, least: float, open_end: bool) -> None:
        value = getattr(self, name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or (open_end and value == least):
            raise ValueError(f"Cluster.{name} must be a finite number {bounds}, got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; Cluster(**fields) is the inverse."""
        return dataclasses.asdict(self)

    def all_to_all_s(self, members: tuple[int, ...], sent_bytes: float) -> float:
        """Seconds of an all-to-all in which each of `members`, ascending, sends these bytes to the others, evenly.

        All sets of ranks of a topology make theirs at the same time.
        """
        n = len(members)
        if n == 1:
            return 0.0
        host = members[0] // self.ranks_per_host
        near = sum(rank // self.ranks_per_host == host for rank in members)
        inside = sent_bytes * (near - 1) / (n - 1)
        between = sent_bytes * (n - near) / (n - 1) * self.ranks_per_host
        return (n - 1) * self.latency_s + max(inside / self.inside_bytes_per_s, between / self.between_bytes_per_s)

    def all_reduce_s(self, members: tuple[int, ...], summed_bytes: float) -> float:
        """Seconds of a ring all-reduce of `summed_bytes` on each of `members`."""
        n = len(members)
        if n == 1:
            return 0.0
        host = members[0] // self.ranks_per_host
        near = sum(rank // self.ranks_per_host == host for rank in members)
        # A ring in the order of ranks leaves a host once for all members there; other sets of ranks share the card.
        rings = self.ranks_per_host // near if near < n else 0
        sent = 2 * (n - 1) / n * summed_bytes
        slowest = max(sent / self.inside_bytes_per_s if near > 1 else 0.0, rings * sent / self.between_bytes_per_s)
        return 2 * (n - 1) * self.latency_s + slowest

    def topologies(self) -> list[Topology]:
        """Numbers of groups that divide the ranks, fewest first, in both orders of ranks where they differ."""
        topologies = [Topology()]
        for groups in (g for g in range(2, self.ranks + 1) if self.ranks % g == 0):
            topologies.append(Topology(groups))
            if groups < self.ranks:
                topologies.append(Topology(groups, replicas_together=True))
        return topologies
