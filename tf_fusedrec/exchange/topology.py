"""Two-dimensional sparse parallelism: R ranks form C groups, each with a complete copy (replica) of all tables.

    groups = 2 of 4 ranks        shard 0   shard 1
      group 0                    rank 0    rank 1     all-to-all of ids, rows and gradients: along a row, R / C ranks
      group 1                    rank 2    rank 3     exchange between replicas of a shard: along a column, C ranks

An all-to-all among R / C ranks sends fewer and longer messages, and waits for fewer ranks. It costs C times the memory
for tables, and the traffic along the columns. schedules/planning/ compares them.

Functions here import TensorFlow where they need it, so that settings can be read before it is loaded.

Sources: Zhang et al., "Two-dimensional sparse parallelism" (2D-SP), sections 3 and 5; TurboGR, section 4.2.1 (HSP).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec.config import TableConfig

RULES = ("gradient_sync", "weight_sync")


@dataclasses.dataclass(frozen=True)
class Topology:
    """How ranks share the tables of a FusedEmbedding.

    Pass the topology to `tf_fusedrec.init(topology)` in every process, and again to every layer that uses it,
    `FusedEmbedding(..., topology=topology)`. All ranks have all dense weights.

    Args:
      groups: C >= 1, number of replicas of every table. It must divide the number of ranks. 1: one table over all
        ranks.
      rule: How replicas stay equal:
        "gradient_sync" (HSP, TurboGR 4.2.1): Each rank looks up rows for its group. Ids and gradient sums of all
          groups reach all replicas before the update, which is the same everywhere. The result equals that of one
          group, except for the order of sums. Learning rates, admission, eviction and counters work as in one group.
          A step issues two more collectives with two groups, and four more with more groups: gradient_sync.py.
        "weight_sync" (2D-SP, Algorithm 1): Groups train separately. Each divides gradients by the weight of its samples
          (losses.global_mean does so). Rows and moments become the mean over groups every `sync_every` updates. The
          mean includes rows that a group has not touched, and the initial rows of ids without a row. It costs less
          with a large sync_every, and does not equal one group. Not for tables with admission_count, hot_after or
          frequency_decay_steps.
      sync_every: k >= 1, number of updates between two averages of "weight_sync".
      average_late: True to compute the mean of "weight_sync" during the step after its update. The mean of the rows
        after update t is exchanged while batch t + 1 computes, and merged after update t + 1, so the changes of other
        groups arrive exactly one update later. A replica keeps the changes that it made in between (replicas.py).
        PipelinedModel averages without delay before evaluation, predictions, saves and at the end of fit; checkpoints
        and exports do so in every model. SemiAsync and Pipelined hide the mean without it.
      moment_scale: c in (0, C], for "weight_sync". A C-th of the batch makes moments v grow about C times too much. So
        v0 + (v - v0) / c replaces v in the step of Adagrad, RowWiseAdagrad, RMSprop, Adam and AdamW, unless their
        record has a moment_scale. v0 is the initial v. None: C, as 2D-SP recommends. 1 switches the scale off.
      replicas_together: Which ranks form a group. False: consecutive ranks, so that a group fills entire hosts, and its
        all-to-all is fast. True: replicas of one shard are consecutive ranks. They share a host if C divides its number
        of processes, and the traffic between replicas is fast (2D-SP, section 5).

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
        for name, value in (("groups", self.groups), ("sync_every", self.sync_every)):
            if type(value) is not int or value < 1:
                raise ValueError(f"Topology.{name} must be an int >= 1, got {value!r}.")
        if self.rule not in RULES:
            raise ValueError(f"Topology.rule must be one of {RULES}, got {self.rule!r}.")
        if self.moment_scale is not None and not 0 < self.moment_scale <= self.groups:
            raise ValueError(f"Topology.moment_scale must be in (0, groups={self.groups}], got {self.moment_scale!r}.")
        if self.rule != "weight_sync" and (self.sync_every != 1 or self.moment_scale is not None):
            raise ValueError(
                f"Topology.sync_every and moment_scale need the rule 'weight_sync', got {self.sync_every} and "
                f"{self.moment_scale} with {self.rule!r}. Use rule='weight_sync', or their defaults."
            )
        if not isinstance(self.average_late, bool):
            raise ValueError(f"Topology.average_late must be True or False, got {self.average_late!r}.")
        if self.average_late and self.rule != "weight_sync":
            raise ValueError(
                f"Topology.average_late needs the rule 'weight_sync', got {self.rule!r}, where sums must reach the "
                "update of the same step. Use rule='weight_sync', or average_late=False."
            )

    def check_table(self, table: TableConfig) -> None:
        """Raises ValueError for a table whose rows replicas cannot keep alike."""
        if table.limits.ttl_minutes and self.groups > 1:
            raise ValueError(
                f"limits.ttl_minutes of table {table.name!r} is {table.limits.ttl_minutes} under {self}, "
                "and the clocks of its groups differ. Use limits.ttl, or Topology(groups=1)."
            )

    @property
    def scale_of_moments(self) -> float:
        """c; 1 means no scale."""
        if self.rule != "weight_sync":
            return 1.0
        return float(self.groups if self.moment_scale is None else self.moment_scale)

    def sets(self, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The ranks of each group by shard, and of each shard's replicas by group, for R = size."""
        if size % self.groups:
            divisors = [groups for groups in range(1, size + 1) if size % groups == 0]
            raise ValueError(
                f"Topology.groups must divide the number of ranks, {size}, got {self.groups}. Use one of {divisors}."
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
      world: All ranks.
      group: Ranks of this process's group. Its index in them is its shard.
      replicas: Ranks with the same shard. Its index in them is its group.
      shares_gradients: True if an update sums the gradients of all groups.
      averages: True if groups train separately and their replicas are averaged.
      averages_late: True if the mean of replicas is merged one update late.
      piece: Number of this process's piece of each table in a checkpoint, of R pieces by hash. The replicas of a shard
        divide its range of hashes, so every row is written once, and all ranks write.
      loss_ranks: Ranks over which a loss is a mean. Gradients are divided by the weight of these ranks.
    """

    def __init__(self, topology: Topology):
        from tf_fusedrec.exchange import collectives

        rank, (groups, shards) = collectives.rank(), topology.sets(collectives.size())
        self.topology, self.world = topology, collectives.world()
        self.group = collectives.among(next(ranks for ranks in groups if rank in ranks))
        self.replicas = collectives.among(next(ranks for ranks in shards if rank in ranks))
        self.shares_gradients = self.replicas.size > 1 and topology.rule == "gradient_sync"
        self.averages = self.replicas.size > 1 and topology.rule == "weight_sync"
        self.averages_late = self.averages and topology.average_late
        self.piece = self.group.index * self.replicas.size + self.replicas.index
        self.loss_ranks = self.group if self.averages else self.world


def init(
    *topologies: Topology,
    timeline: bool = False,
    exchange: str | None = None,
    report_after_s: float | None = None,
    give_up_after_s: int | None = None,
) -> None:
    """Joins the other processes under horovodrun, and does nothing otherwise. A second call is allowed.

    The ranks of a host share its cores: TF_NUM_INTRAOP_THREADS, unless it is set, becomes cores / ranks, which counts
    if TensorFlow has run no op yet.

    Args:
      topologies: Topologies of all layers; none for tables over all ranks.
      timeline: True if callbacks.Timeline will record steps of this job. It slows every step, because Horovod's writer
        on rank 0 uses up to one core, recording or not. HOROVOD_TIMELINE=DYNAMIC has the same effect.
      exchange: "gloo" for all-to-alls and sums without Horovod's negotiation, "nccl" to move rows and sums between
        GPUs (never run on a GPU yet; not with groups of ranks), or "horovod"; the same on all ranks.
        None: the environment variable FUSEDREC_EXCHANGE, or else "gloo" where all ranks have its library, except under
        mpirun, with a timeline, or with a Horovod that has NCCL.
      report_after_s: Seconds after which a rank that waits in a collective names the ranks that it waits for. None: the
        environment variable FUSEDREC_REPORT_AFTER_SECONDS, or 60.
      give_up_after_s: Seconds after which a job ends because a rank gives no sign of life, or because two ranks wait
        for each other in different collectives. None: the environment variable HOROVOD_GLOO_TIMEOUT_SECONDS, or 600. It
        has no effect when Horovod was initialized before.

    Raises:
      ImportError: there are several processes, but Horovod is not installed.
      ValueError: the groups of a topology do not divide the number of processes, or the engine cannot be used.
      RuntimeError: a second call names a topology, an engine or a timeline that the first call did not name, or
        horovodrun writes a timeline already.

    Examples:
      >>> fr.init(fr.Topology(groups=1))
      >>> fr.rank(), fr.size()
      (0, 1)
    """
    from tf_fusedrec.exchange import collectives
    from tf_fusedrec.exchange.horovod import check_timeline

    size = collectives.launched_size()
    sets = [ranks for topology in topologies for sets in topology.sets(size) for ranks in sets]
    limits: dict[str, Any] = {"report_after_s": report_after_s, "give_up_after_s": give_up_after_s}
    collectives.init(sets, timeline=timeline, exchange=exchange, **limits)
    if timeline:
        check_timeline()
