"""Two-dimensional sparse parallelism: R ranks as G groups, each with a whole copy (replica) of all tables.

    groups = 2 of 4 ranks        shard 0   shard 1
      group 0                    rank 0    rank 1     all-to-all of ids, rows and gradients: along a row, R / G ranks
      group 1                    rank 2    rank 3     what keeps the replicas of a shard equal: along a column, G ranks

An all-to-all among R / G ranks sends fewer and longer messages, and its slowest rank waits for fewer others. The price
is memory, G times as much for tables, and the traffic along the columns. planning/ weighs them.

Sources: Zhang et al., "Two-dimensional sparse parallelism" (2D-SP), sections 3 and 5; TurboGR, section 4.2.1 (HSP).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.exchange import collectives

RULES = ("gradient_sync", "weight_sync")


@dataclasses.dataclass(frozen=True)
class Topology:
    """How ranks share the tables of a FusedEmbedding.

    Every process names the topology when it joins, `tf_fusedrec.init(topology)`, and every layer that has it,
    `FusedEmbedding(..., topology=topology)`. Dense weights are replicated on all ranks as ever.

    Args:
      groups: G >= 1, replicas of every table; it must divide the number of ranks. 1: one table over all ranks.
      rule: what keeps replicas equal:
        "gradient_sync" (HSP, TurboGR 4.2.1): a rank looks up rows for its own group. The ids and the sums of gradients
          of all groups reach all replicas before the update, which is the same everywhere. Equal to one group but for
          the order in which gradients are summed; learning rates, admission, eviction and counters are those of one
          group. Four more collectives in a step, among the replicas of a shard: gradient_sync.py.
        "weight_sync" (2D-SP, Algorithm 1): groups train apart, each with gradients divided by its own weight
          (losses.global_mean knows), and rows and moments become the mean over groups every `sync_every` updates. Rows
          that a group has not touched count, too, and ids without a row count as their initial row. Cheaper for large
          sync_every; not equal to one group. Not for tables with admission_count or hot_after.
      sync_every: k >= 1, updates between two synchronisations of "weight_sync".
      moment_scale: c > 0, of "weight_sync": second moments of gradients of a G-th of the batch are about G times too
        large, and v / c stands for them in the step of Adagrad, RowWiseAdagrad, Adam and AdamW, unless their record has
        a moment_scale of its own. None: G, as 2D-SP recommends; 1 switches it off; its range is (0, G].
      replicas_together: which ranks are a group. False: consecutive ones, so that a group fills whole hosts, and the
        all-to-all inside it is quick. True: replicas of one shard are consecutive ranks, so that they sit on one host
        when G divides its number of processes, and the traffic between replicas is quick (2D-SP, section 5).

    Raises:
      ValueError: an argument is out of its range. When ranks are known: groups does not divide them.
    """

    groups: int = 1
    rule: str = "gradient_sync"
    sync_every: int = 1
    moment_scale: float | None = None
    replicas_together: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise ValueError(f"Topology.groups must be an int >= 1, got {self.groups!r}.")
        if self.rule not in RULES:
            raise ValueError(f"Topology.rule must be one of {RULES}, got {self.rule!r}.")
        if not isinstance(self.sync_every, int) or isinstance(self.sync_every, bool) or self.sync_every < 1:
            raise ValueError(f"Topology.sync_every must be an int >= 1, got {self.sync_every!r}.")
        if self.moment_scale is not None and not 0 < self.moment_scale <= self.groups:
            raise ValueError(
                f"Topology.moment_scale must be > 0 and at most groups, {self.groups}, got {self.moment_scale!r}."
            )
        if self.rule != "weight_sync" and (self.sync_every != 1 or self.moment_scale is not None):
            raise ValueError(
                f"Topology.sync_every and moment_scale are of the rule 'weight_sync', got {self.sync_every} and "
                f"{self.moment_scale} with {self.rule!r}. Remedy: leave them out, or rule='weight_sync'."
            )

    @property
    def scale_of_moments(self) -> float:
        """c, 1 where there is nothing to scale."""
        if self.rule != "weight_sync":
            return 1.0
        return float(self.groups if self.moment_scale is None else self.moment_scale)

    def sets(self, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Ranks of each group by shard, and ranks of each shard's replicas by group.

        Args:
          size: R.

        Raises:
          ValueError: groups does not divide R.
        """
        if size % self.groups:
            fitting = [g for g in range(1, size + 1) if size % g == 0]
            raise ValueError(
                f"Topology.groups must divide the number of ranks, which is {size}, got {self.groups}. "
                f"Remedy: one of {fitting}, or another number of ranks."
            )
        shards = size // self.groups

        def rank(group: int, shard: int) -> int:
            return shard * self.groups + group if self.replicas_together else group * shards + shard

        groups = [tuple(rank(g, s) for s in range(shards)) for g in range(self.groups)]
        return groups, list(zip(*groups))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; Topology(**fields) is the inverse."""
        return dataclasses.asdict(self)


class Place:
    """Where this process stands in a topology.

    Attributes:
      topology: the record.
      group: ranks of this process's group; its index among them is the shard that it holds.
      replicas: ranks that hold the same shard; its index among them is the number of its group.
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        groups, shards = topology.sets(collectives.size())
        rank = collectives.rank()
        self.group = collectives.among(next(ranks for ranks in groups if rank in ranks))
        self.replicas = collectives.among(next(ranks for ranks in shards if rank in ranks))

    @property
    def shares_gradients(self) -> bool:
        """Whether updates are made of what all groups have looked up."""
        return self.replicas.size > 1 and self.topology.rule == "gradient_sync"

    @property
    def averages(self) -> bool:
        """Whether groups train apart and their replicas are averaged."""
        return self.replicas.size > 1 and self.topology.rule == "weight_sync"

    @property
    def piece(self) -> int:
        """Which piece of each table this process writes into a checkpoint, when its hashes are cut into R pieces.

        A shard's range is cut into as many as it has replicas: every row is written once, and all ranks write.
        """
        return self.group.index * self.replicas.size + self.replicas.index

    @property
    def loss_ranks(self) -> collectives.Ranks:
        """Ranks whose values a loss is the mean of: gradients are divided by the weight of these."""
        return self.group if self.averages else collectives.world()


def init(
    *topologies: Topology,
    timeline: bool = False,
    report_after_s: float | None = None,
    give_up_after_s: int | None = None,
) -> None:
    """Joins the other processes when launched under horovodrun; does nothing otherwise. May be called again.

    Args:
      topologies: of the layers that will be made; none for tables over all ranks.
      timeline: whether timeline.Timeline will record steps of this job, which slows every step. See collectives.init.
      report_after_s, give_up_after_s: see collectives.init.

    Raises:
      ImportError: launched with several processes, but Horovod is not installed.
      ValueError: the groups of a topology do not divide the number of processes.
      RuntimeError: called again, with a topology or a timeline that the first call did not name.
    """
    size = collectives.launched_size()
    sets = [ranks for topology in topologies for sets in topology.sets(size) for ranks in sets]
    collectives.init(sets, timeline=timeline, report_after_s=report_after_s, give_up_after_s=give_up_after_s)
