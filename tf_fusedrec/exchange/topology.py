"""Two-dimensional sparse parallelism: R ranks as C groups, each with a whole copy (replica) of all tables.

    groups = 2 of 4 ranks        shard 0   shard 1
      group 0                    rank 0    rank 1     all-to-all of ids, rows and gradients: along a row, R / C ranks
      group 1                    rank 2    rank 3     exchange between replicas of a shard: along a column, C ranks

An all-to-all among R / C ranks sends fewer and longer messages, and its slowest rank waits for fewer others. The price
is memory, C times as much for tables, and the traffic along the columns. schedules/planning/ weighs them.

Sources: Zhang et al., "Two-dimensional sparse parallelism" (2D-SP), sections 3 and 5; TurboGR, section 4.2.1 (HSP).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.horovod import check_timeline

RULES = ("gradient_sync", "weight_sync")


@dataclasses.dataclass(frozen=True)
class Topology:
    """How ranks share the tables of a FusedEmbedding.

    Every process names the topology when it joins, `tf_fusedrec.init(topology)`. Every layer of the topology names it
    again, `FusedEmbedding(..., topology=topology)`. All ranks hold all dense weights.

    Args:
      groups: C >= 1, number of replicas of every table. It must divide the number of ranks. 1: one table over all
        ranks.
      rule: How replicas stay equal:
        "gradient_sync" (HSP, TurboGR 4.2.1): A rank looks up rows for its own group. Ids and sums of gradients of all
          groups reach all replicas before the update, which is the same everywhere. The result equals one group's,
          except for the order of sums. Learning rates, admission, eviction and counters work as in one group. A step
          makes two more collectives with two groups, and four more with more groups: gradient_sync.py.
        "weight_sync" (2D-SP, Algorithm 1): Groups train apart. Each divides gradients by its own weight
          (losses.global_mean does so). Rows and moments become the mean over groups every `sync_every` updates. The
          mean includes rows that a group has not touched, and the initial rows of ids without a row. It costs less
          with a large sync_every, and does not equal one group. Tables with admission_count, hot_after or
          frequency_decay_steps refuse it.
      sync_every: k >= 1, number of updates between two synchronisations of "weight_sync".
      average_late: True to compute the mean of "weight_sync" during the step behind its update. The mean of the rows
        behind update t is exchanged while batch t + 1 computes, and merged behind update t + 1. So rows lack the
        changes of other groups for exactly one update more. A replica keeps the changes that it made meanwhile:
        replicas.py has the rule. PipelinedModel averages without delay before evaluation, predictions, saves and at
        the end of fit; checkpoints and exports do so in every model. SemiAsync and Pipelined hide the mean without it.
      moment_scale: c in (0, C], for "weight_sync". A C-th of the batch makes moments v grow about C times too much. So
        v0 + (v - v0) / c replaces v in the step of Adagrad, RowWiseAdagrad, RMSprop, Adam and AdamW, unless their
        record has a moment_scale. v0 is the initial v. None: C, as 2D-SP recommends. 1 switches the scale off.
      replicas_together: Which ranks make a group. False: consecutive ranks, so that a group fills whole hosts, and the
        all-to-all inside it is quick. True: replicas of one shard are consecutive ranks. They share a host if C divides
        its number of processes, and the traffic between replicas is quick (2D-SP, section 5).

    Raises:
      ValueError: an argument is out of its range; or, once ranks are known, groups does not divide them.
    """

    groups: int = 1
    rule: str = "gradient_sync"
    sync_every: int = 1
    moment_scale: float | None = None
    replicas_together: bool = False
    average_late: bool = False

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
        if not isinstance(self.average_late, bool):
            raise ValueError(f"Topology.average_late must be True or False, got {self.average_late!r}.")
        if self.average_late and self.rule != "weight_sync":
            raise ValueError(
                f"Topology.average_late is of the rule 'weight_sync', got {self.rule!r}, whose sums must reach "
                "the update of their own step. Remedy: leave it out, or rule='weight_sync'."
            )

    @property
    def scale_of_moments(self) -> float:
        """c; 1 means no scale."""
        if self.rule != "weight_sync":
            return 1.0
        return float(self.groups if self.moment_scale is None else self.moment_scale)

    def sets(self, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The ranks of each group by shard, and the ranks of each shard's replicas by group.

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
        """The fields, JSON-able. Topology(**fields) is the inverse."""
        return dataclasses.asdict(self)


class RankLayout:
    """The position of this process in a topology.

    Attributes:
      topology: The topology.
      group: Ranks of this process's group. The index of the process among them is its shard.
      replicas: Ranks that hold the same shard. The index of the process among them is its group.
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        groups, shards = topology.sets(collectives.size())
        rank = collectives.rank()
        self.group = collectives.among(next(ranks for ranks in groups if rank in ranks))
        self.replicas = collectives.among(next(ranks for ranks in shards if rank in ranks))

    @property
    def shares_gradients(self) -> bool:
        """True if an update sums the gradients of all groups."""
        return self.replicas.size > 1 and self.topology.rule == "gradient_sync"

    @property
    def averages(self) -> bool:
        """True if groups train apart and their replicas are averaged."""
        return self.replicas.size > 1 and self.topology.rule == "weight_sync"

    @property
    def averages_late(self) -> bool:
        """True if the mean of replicas is merged one update late."""
        return self.averages and self.topology.average_late

    @property
    def piece(self) -> int:
        """The piece of each table, of R pieces by hash, that this process writes into a checkpoint.

        The replicas of a shard divide its range of hashes. So every row is written once, and all ranks write.
        """
        return self.group.index * self.replicas.size + self.replicas.index

    @property
    def loss_ranks(self) -> collectives.Ranks:
        """The ranks over which a loss is a mean. Gradients are divided by the weight of these ranks."""
        return self.group if self.averages else collectives.world()


def init(
    *topologies: Topology,
    timeline: bool = False,
    report_after_s: float | None = None,
    give_up_after_s: int | None = None,
) -> None:
    """Joins the other processes under horovodrun, and does nothing otherwise. A second call is allowed.

    Args:
      topologies: Topologies of all layers; none for tables over all ranks.
      timeline: True if timeline.Timeline will record steps of this job, which slows every step. See collectives.init.
      report_after_s, give_up_after_s: see collectives.init.

    Raises:
      ImportError: there are several processes, but Horovod is not installed.
      ValueError: the groups of a topology do not divide the number of processes.
      RuntimeError: a second call names a topology or a timeline that the first call did not name, or horovodrun writes
        a timeline already.
    """
    size = collectives.launched_size()
    sets = [ranks for topology in topologies for sets in topology.sets(size) for ranks in sets]
    collectives.init(sets, timeline=timeline, report_after_s=report_after_s, give_up_after_s=give_up_after_s)
    if timeline:
        check_timeline()
