"""Collectives among all ranks or some of them. An engine (horovod.py, gloo.py, nccl.py) moves the data.

Every collective has a name, the same on all ranks. Engines match collectives by name, and Horovod's response cache
needs equal names in every step. The processes make all sets of ranks when they join, because Horovod would have to look
for later ones in every cycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras_api, tf
from tf_fusedrec.exchange import gloo, nccl
from tf_fusedrec.exchange.horovod import Horovod
from tf_fusedrec.exchange.job_end import start_watchdog

T = TypeVar("T")


class Exchange(Protocol):
    """Collectives of one engine. This module adds marks for the watchdog, and the loop-back of a single rank.

    All ranks call the methods in the same order, in a traced function while it is traced. So an engine that needs a
    fixed order of collectives can number them.
    """

    name: str  # value of the argument `exchange` of init()
    joined_bytes: int  # of dense gradients that one call of `average` may have; 0: one gradient
    joined_from: int  # the least number of tensors that share a call of `all_to_all`; 0: none share one
    rank: int
    size: int

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], splits: Sequence[tf.Tensor], received_splits: Sequence[tf.Tensor], *,
        name: str, ranks: tuple[int, ...],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
        """See all_to_all below. An engine need not exchange received_splits that are known, of all tensors or none."""

    def all_reduce(self, tensor: tf.Tensor, *, name: str, ranks: tuple[int, ...]) -> tf.Tensor:
        """The sum over `ranks`."""

    def average(self, gradients: Sequence[Any], *, name: str | None) -> list[Any]:
        """The means over all ranks of tensors, or of one IndexedSlices. Only an eager call has no name."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The picklable objects of all ranks. Eager."""

    def broadcast(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Rank 0's tensor. Eager."""


class _LoopBack:
    """The engine of one rank."""

    name, joined_bytes, joined_from, rank, size = "none", 0, 0, 0, 1

    def all_to_all(self, tensors: Any, splits: Any, *_: Any, **__: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        sent = [tf.strided_slice(tensor, [0], of_tensor, [1]) for tensor, of_tensor in zip(tensors, splits)]
        return sent, [*map(tf.identity, splits)]

    def all_reduce(self, tensor: tf.Tensor, **_: Any) -> tf.Tensor:
        return tensor

    def average(self, gradients: Sequence[Any], **_: Any) -> list[Any]:
        return list(gradients)

    def broadcast(self, tensor: tf.Tensor, **_: Any) -> tf.Tensor:
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


_ENGINES = (Horovod.name, gloo.Gloo.name, nccl.Nccl.name)
# Types of the engines' ops, which are named as their collectives.
ALL_TO_ALLS = ("HorovodAlltoall", "Fusedrec>ExchangeAllToAll", "Fusedrec>NcclAllToAll")
SUMS = ("HorovodAllreduce", "Fusedrec>ExchangeSum", "Fusedrec>NcclSum")
_LOOP_BACK: Exchange = _LoopBack()
_engine = _LOOP_BACK  # of all ranks once init() has joined several processes
_sets: set[tuple[int, ...]] = set()  # the sets of ranks that the processes joined with
_members: dict[str, tuple[int, ...]] = {}  # ranks of each collective that not all ranks run, by its name


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that take part in a collective. All of them call it, and no other rank does."""

    members: tuple[int, ...]  # ascending
    index: int  # of this process among them
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.members))


def launched_size() -> int:
    """The number of processes that were launched together, known before they join."""
    return int(os.environ.get("HOROVOD_SIZE", "1"))


def init(
    sets: Iterable[Sequence[int]] = (),
    *,
    timeline: bool = False,
    exchange: str | None = None,
    report_after_s: float | None = None,
    give_up_after_s: int | None = None,
) -> None:
    """Joins the other processes under horovodrun, and does nothing otherwise. A second call is allowed.

    Args:
      sets: Sets of ranks that will run collectives among themselves; the same on all ranks.
      timeline, exchange, report_after_s, give_up_after_s: As for topology.init.

    Raises:
      ImportError: there are several processes, but Horovod is not installed.
      ValueError: there is no such engine, it cannot be used, or the ranks name different ones.
      RuntimeError: a second call names sets or an engine that the first call did not name.
    """
    global _engine
    engine_name = exchange or os.environ.get("FUSEDREC_EXCHANGE")
    if engine_name not in (None, *_ENGINES):
        raise ValueError(
            f"exchange must be one of {list(_ENGINES)}, got {engine_name!r}. Use one of them in tf_fusedrec.init or in "
            "FUSEDREC_EXCHANGE."
        )
    if launched_size() == 1:
        return
    # One rank needs no collective, and the set of all ranks exists already.
    needed = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in sets if 1 < len(ranks) < launched_size()))
    if needed and engine_name == nccl.Nccl.name:
        raise ValueError(
            f"exchange must be 'gloo' or 'horovod' for the sets of ranks {needed}, got 'nccl', which joins all ranks. "
            "Use Topology(groups=1), or another engine."
        )
    if _engine is not _LOOP_BACK:
        missing = [ranks for ranks in needed if ranks not in _sets]
        if missing:
            raise RuntimeError(
                f"The processes have joined without the sets of ranks {missing}, which must be passed to the first "
                "init(). Use tf_fusedrec.init(*topologies) with all topologies."
            )
        if exchange not in (None, _engine.name):
            raise RuntimeError(
                f"The processes have joined with exchange={_engine.name!r}, got {exchange!r}. Use "
                "tf_fusedrec.init(exchange=...) in the first call."
            )
        return
    horovod = Horovod()
    ending = start_watchdog(launched_size(), _members, report_after_s, give_up_after_s)
    with _waiting("init"):
        horovod.join(needed, timeline=timeline)
        engine = nccl.Nccl if engine_name == nccl.Nccl.name else gloo.Gloo
        _engine = gloo.choose(horovod, engine_name, has_store=ending is not None, engine=engine)
    _sets.update(needed)
    if ending is not None:
        ending.install(_engine.own_failure if isinstance(_engine, nccl.Nccl) else None)


@contextlib.contextmanager
def _waiting(name: str) -> Iterator[None]:
    """Marks a collective that Python calls. As with ops, one that failed has not ended: its rank still names it."""
    ops.mark_now(name, ended=False)
    yield
    ops.mark_now(name, ended=True)


def _begin(tensor: tf.Tensor, name: str, ranks: Ranks, *, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Marks a collective as begun, as soon as everything that it sends exists. Returns `tensor` after the mark."""
    if ranks.size == 1:
        return tensor
    if ranks.size < size():
        _members[name] = ranks.members
    with tf.control_dependencies([sent for sent in after if tf.is_symbolic_tensor(sent)]):
        return ops.mark_collective(tensor, name=name, ended=False)


def _end(tensor: tf.Tensor, name: str, ranks: Ranks) -> tf.Tensor:
    return tensor if ranks.size == 1 else ops.mark_collective(tensor, name=name, ended=True)


def check_init() -> None:
    """Raises RuntimeError if the process is one of several and init() was not called."""
    if _engine is _LOOP_BACK and launched_size() > 1:
        raise RuntimeError(
            f"This is one of {launched_size()} processes, but they have not joined. Use tf_fusedrec.init() first thing "
            "in the program."
        )


def exchange_name() -> str:
    """The engine of the ranks, as init() names it; "none" for one process.

    Examples:
      >>> fr.collectives.exchange_name()
      'none'
    """
    return _engine.name


def rank() -> int:
    """The number of this process, 0 <= rank < size."""
    return _engine.rank


def size() -> int:
    """The number of processes, R."""
    return _engine.size


def world() -> Ranks:
    """All ranks."""
    return Ranks(tuple(range(size())), rank())


def among(members: Sequence[int]) -> Ranks:
    """The set of these ranks, of which this process must be one.

    Raises:
      RuntimeError: the processes have joined without this set.
    """
    ranks = Ranks(tuple(sorted(members)), sorted(members).index(rank()))
    if 1 < ranks.size < size() and ranks.members not in _sets:
        raise RuntimeError(
            f"The processes have joined without the set of ranks {ranks.members}. Use tf_fusedrec.init(topology) when "
            "they join."
        )
    return ranks


def _engine_of(ranks: Ranks) -> Exchange:
    return _LOOP_BACK if ranks.size == 1 else _engine


def all_to_all(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    *,
    name: str,
    ranks: Ranks | None = None,
    received_splits: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends slices of the first dimension to all ranks and returns the received slices, in rank order.

    Args:
      tensor: [P, ...] with P >= sum(splits). Rows after the sum are padding and stay here.
      splits: <int32>[R], rows for each rank.
      name: Name of the collective, the same on all ranks and in every step. All-to-alls in flight have different names.
      ranks: The R ranks that take part; None for all.
      received_splits: <int32>[R], rows from each rank, where the caller knows them. Horovod exchanges them anyway.

    Returns:
      The received rows [sum of received_splits, ...] and received_splits <int32>[R].
    """
    return _all_to_all([Outgoing(name, tensor, splits, received_splits)], ranks or world())[0]


class Outgoing(NamedTuple):
    """The arguments of an all_to_all."""

    name: str
    tensor: tf.Tensor
    splits: tf.Tensor
    received_splits: tf.Tensor | None


def all_to_alls(outgoing: Sequence[Outgoing], ranks: Ranks) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The results of the all_to_all of each. Those that `joins` are one collective, with the name of the first."""
    if joins(len(outgoing), ranks) and all(sent.received_splits is not None for sent in outgoing):
        return _all_to_all(outgoing, ranks)
    return [
        all_to_all(tensor, splits, name=name, ranks=ranks, received_splits=received_splits)
        for name, tensor, splits, received_splits in outgoing
    ]


def joins(tensors: int, ranks: Ranks) -> bool:
    """Whether so many tensors share an all-to-all, if their received_splits are known."""
    return 0 < _engine_of(ranks).joined_from <= tensors


def _all_to_all(outgoing: Sequence[Outgoing], ranks: Ranks) -> list[tuple[tf.Tensor, tf.Tensor]]:
    (name, *_), (first, *rest), splits, known = zip(*outgoing)
    arrived, received_splits = _engine_of(ranks).all_to_all(
        [_begin(first, name, ranks, after=[*rest, *splits]), *rest], splits, [of for of in known if of is not None],
        name=name, ranks=ranks.members,
    )  # fmt: skip
    received = [_end(arrived[0], name, ranks), *arrived[1:]]
    for sent, rows, of_rows in zip(outgoing, received, received_splits):
        rows.set_shape([None, *sent.tensor.shape[1:]])
        of_rows.set_shape([ranks.size])
    return list(zip(received, received_splits))


def all_reduce_sum(tensor: tf.Tensor, *, name: str, ranks: Ranks | None = None) -> tf.Tensor:
    """The sum over all ranks, or over `ranks`, element by element. It passes no gradient."""
    ranks = ranks or world()
    total = _engine_of(ranks).all_reduce(_begin(tensor, name, ranks), name=name, ranks=ranks.members)
    return tf.stop_gradient(_end(total, name, ranks))


def average(gradients: Sequence[Any]) -> list[Any]:
    """The means of dense gradients over all ranks: tensors, IndexedSlices, or None, which stays None.

    In a traced step a collective has the name of its first tensor, which is the same on all ranks.
    """
    averaged = list(gradients)
    for places in _together(gradients, _engine.joined_bytes):
        first, *rest = (gradients[i] for i in places)
        name = None
        if _is_traced(first):
            name = "dense_gradients_" + re.sub(r"[^a-zA-Z0-9_]", "_", first.name)
            first = _begin(first, name, world(), after=rest)
        means = _engine.average([first, *rest], name=name)
        if name is not None:
            means[0] = _end(means[0], name, world())
        for i, mean in zip(places, means):
            averaged[i] = mean
    return averaged


def _together(gradients: Sequence[Any], most_bytes: int) -> list[list[int]]:
    """Places of gradients, by collective: neighbors of one dtype with up to `most_bytes`, others alone."""
    groups: list[list[int]] = []
    room, dtype = 0, None  # of the last group; without dtype it stays alone
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        known = _is_traced(gradient) and gradient.shape.is_fully_defined()
        size = gradient.shape.num_elements() * gradient.dtype.size if known else 0
        if known and size <= room and gradient.dtype == dtype:
            groups[-1].append(i)
        else:
            groups.append([i])
            room, dtype = most_bytes, gradient.dtype if known and most_bytes else None
        room -= size
    return groups


def _is_traced(gradient: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and tf.is_symbolic_tensor(gradient)


def all_gather(array: np.ndarray) -> np.ndarray:
    """Concatenates NumPy arrays of all ranks along axis 0, in rank order. Their lengths may differ. Eager.

    Examples:
      >>> fr.collectives.all_gather(np.array([[fr.rank(), 7]]))
      array([[0, 7]])
      >>> fr.collectives.all_gather_object({"rank": fr.rank()})
      [{'rank': 0}]
      >>> fr.collectives.broadcast_variables([tf.Variable(1.0)])
      >>> fr.collectives.barrier()
    """
    return np.concatenate(all_gather_object(np.asarray(array)))


def all_gather_object(value: Any) -> list[Any]:
    """The picklable objects of all ranks, in rank order. Eager."""
    with _waiting("all_gather_object"):
        return _engine.all_gather_object(value)


def broadcast_variables(variables: Sequence[tf.Variable]) -> None:
    """Sets the variables, in the same order on all ranks, to rank 0's values. Eager."""
    with _waiting("broadcast_variables"):
        for number, variable in enumerate(variables):
            variable = keras_api.tf_variable(variable)
            variable.assign(_engine.broadcast(variable.read_value(), name=f"fusedrec.broadcast.{number}"))


def barrier() -> None:
    """Returns when every rank has called it."""
    with _waiting("barrier"):
        _engine.all_reduce(tf.zeros([]), name="fusedrec.barrier", ranks=world().members)


def agree(work: Callable[[], T]) -> T:
    """Runs `work` on every rank and returns this rank's result if all ranks succeeded. Collective.

    Raises:
      Exception: the exception that `work` raised on this rank.
      RuntimeError: `work` failed on another rank only; the message quotes the failure.
    """
    failure = None
    try:
        result = work()
    except Exception as error:  # The other ranks must learn of any failure before it propagates here.
        failure = error
    messages = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for failed_rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"It failed on rank {failed_rank}, so no rank goes on: {message}")
    return result


def on_rank_0(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank. The result must be picklable. Collective.

    Raises:
      Exception, RuntimeError: `work` failed; see agree.
    """
    result = agree(work if rank() == 0 else lambda: None)
    return all_gather_object(result)[0]
