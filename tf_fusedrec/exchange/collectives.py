"""The only file that imports Horovod: all-to-all, all-reduce, gather, barrier. One process gets a loop-back instead.

Every collective has a name, the same on all ranks. Horovod matches collectives by name, and its response cache needs
equal names and shapes in every step.

A collective of a training step runs among all ranks or among some (`Ranks`), which Horovod calls a process set. The
processes make all sets when they join. Horovod would have to look for later ones in every cycle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import weight_equality
from tf_fusedrec.exchange.gradient_accumulation import accumulate
from tf_fusedrec.exchange.gradient_averaging import averaging
from tf_fusedrec.exchange.horovod_threads import stop_preemption_of_waiting_threads, without_preemption
from tf_fusedrec.exchange.watchdog import start_watchdog

_LOG = logging.getLogger("tf_fusedrec.exchange.collectives")
_hvd: Any = None  # horovod.tensorflow once init() has found more than one process
_process_sets: dict[tuple[int, ...], Any] = {}  # Horovod's, by their ranks
_members: dict[str, tuple[int, ...]] = {}  # of collectives that not all ranks take part in, by name


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that take part in a collective. All of them call it, and no other rank does."""

    members: tuple[int, ...]  # ascending
    index: int  # of this process among them

    @property
    def size(self) -> int:
        return len(self.members)


def launched_size() -> int:
    """The number of processes that were launched together, known before they join."""
    return int(os.environ.get("HOROVOD_SIZE", "1"))


def init(
    sets: Iterable[Sequence[int]] = (),
    *,
    timeline: bool = False,
    report_after_s: float | None = None,
    give_up_after_s: int | None = None,
) -> None:
    """Joins the other processes under horovodrun, and does nothing otherwise. A second call is allowed.

    Args:
      sets: Sets of ranks that will run collectives of their own; the same on all ranks.
      timeline: True if a timeline may be recorded later (horovod_timeline.py). It slows every step of the job, because
        Horovod's writer of rank 0 takes up to a whole core, recording or not. HOROVOD_TIMELINE=DYNAMIC asks likewise.
      report_after_s: Seconds after which a rank that waits in a collective names the ranks that it waits for. None: the
        environment variable FUSEDREC_REPORT_AFTER_SECONDS, or 60.
      give_up_after_s: Seconds without a sign of life of a rank after which Horovod ends the job. None: the environment
        variable HOROVOD_GLOO_TIMEOUT_SECONDS, or 600. It has no effect when Horovod was initialized before.

    Raises:
      ImportError: there are several processes, but Horovod is not installed.
      RuntimeError: a second call names sets that the first call did not name.
    """
    global _hvd
    if launched_size() == 1:
        return
    # One rank needs no collective, and Horovod has the set of all ranks already.
    wanted = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in sets if 1 < len(ranks) < launched_size()))
    if _hvd is not None:
        missing = [ranks for ranks in wanted if ranks not in _process_sets]
        if missing:
            raise RuntimeError(
                f"The processes have joined without sets of ranks {missing}, and later is too late. Remedy: name all "
                "topologies in the first call, tf_fusedrec.init(topology)."
            )
        return
    try:
        import horovod.tensorflow as hvd
    except (ImportError, tf.errors.NotFoundError) as error:  # NotFoundError: a symbol of another TensorFlow
        raise ImportError(
            f"HOROVOD_SIZE is {os.environ['HOROVOD_SIZE']}, but no Horovod for TensorFlow {tf.version.VERSION} loads "
            f"({str(error).splitlines()[0]}). Remedy: `python -m tools.horovod_wheel` in a clone, or no horovodrun."
        ) from error
    if timeline:
        # horovodrun --timeline-filename has set another value, which check_timeline refuses.
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    ending = start_watchdog(launched_size(), _members, report_after_s, give_up_after_s)
    made = {ranks: hvd.ProcessSet(list(ranks)) for ranks in wanted}
    if hvd.is_initialized():
        stop_preemption_of_waiting_threads()
    with _waiting("init"), without_preemption():
        hvd.init(process_sets=list(made.values()) or None)
    _process_sets.update(made)
    _hvd = hvd
    if ending is not None:
        ending.install()


@contextlib.contextmanager
def _waiting(name: str) -> Iterator[None]:
    """Marks a collective that Python calls."""
    ops.mark_now(name, ended=False)
    try:
        yield
    finally:
        ops.mark_now(name, ended=True)


def _begin(tensor: tf.Tensor, name: str, *, after: Sequence[tf.Tensor] = (), ranks: Ranks | None = None) -> tf.Tensor:
    """Marks a collective as begun, as soon as everything that it sends exists. Returns `tensor` after the mark."""
    if ranks is not None and ranks.size < size():
        _members[name] = ranks.members
    with tf.control_dependencies([one for one in after if tf.is_symbolic_tensor(one)]):
        return ops.mark_collective(tensor, name=name, ended=False)


def _end(tensor: tf.Tensor, name: str) -> tf.Tensor:
    return ops.mark_collective(tensor, name=name, ended=True)


def check_init() -> None:
    """Raises RuntimeError if the process is one of several and init() was not called."""
    if _hvd is None and int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"This is one of {os.environ['HOROVOD_SIZE']} processes, but they have not joined. "
            "Call tf_fusedrec.init() first thing in the program."
        )


def horovod() -> Any:
    """The module horovod.tensorflow once several processes have joined, else None."""
    return _hvd


def rank() -> int:
    """The number of this process, 0 <= rank < size."""
    return _hvd.rank() if _hvd else 0


def size() -> int:
    """The number of processes, R."""
    return _hvd.size() if _hvd else 1


def world() -> Ranks:
    """All ranks."""
    return Ranks(tuple(range(size())), rank())


def among(members: Sequence[int]) -> Ranks:
    """The set of these ranks, of which this process must be one.

    Raises:
      RuntimeError: the processes have joined without this set.
    """
    ranks = Ranks(tuple(sorted(members)), sorted(members).index(rank()))
    if 1 < ranks.size < size() and ranks.members not in _process_sets:
        raise RuntimeError(
            f"The processes have joined without the set of ranks {ranks.members}. Remedy: name the topology when they "
            "join, tf_fusedrec.init(topology)."
        )
    return ranks


def _horovod_set(ranks: Ranks | None) -> dict[str, Any]:
    """The keyword of Horovod's collectives for `ranks`. None means all ranks."""
    found = _process_sets.get(ranks.members) if ranks is not None else None
    return {} if found is None else {"process_set": found}


def _alone(ranks: Ranks | None) -> bool:
    return _hvd is None or (ranks is not None and ranks.size == 1)


def _flat(name: str) -> str:
    """`name` without '/', because ignore_name_scope makes Horovod drop the part before the last '/'."""
    return name.replace("/", ".")


# Horovod's all-to-all moves bytes, but does not accept bfloat16.
_CARRIED_AS = {tf.bfloat16: tf.int16}


def all_to_all(
    tensor: tf.Tensor, splits: tf.Tensor, *, name: str, ranks: Ranks | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends slices of the first dimension to all ranks and returns the received slices, in rank order.

    Args:
      tensor: [P, ...] with P >= sum(splits). Rows after the sum are padding and stay here.
      splits: <int32>[R], rows for each rank.
      name: Name of the collective, the same on all ranks and in every step. All-to-alls in flight have different names.
      ranks: The R ranks that take part; None for all.

    Returns:
      The received rows [sum of received_splits, ...] and received_splits <int32>[R].
    """
    if _alone(ranks):
        return tensor[: splits[0]], tf.identity(splits)
    carried = _CARRIED_AS.get(tensor.dtype)
    sent = tf.bitcast(tensor, carried) if carried else tensor
    received, received_splits = _hvd.alltoall(
        _begin(sent, name, after=[splits], ranks=ranks),
        splits=splits, name=_flat(name), ignore_name_scope=True, **_horovod_set(ranks),
    )  # fmt: skip
    received = _end(received, name)
    received = tf.bitcast(received, tensor.dtype) if carried else received
    received.set_shape([None, *tensor.shape[1:]])
    received_splits.set_shape([size() if ranks is None else ranks.size])
    return received, received_splits


def all_reduce_sum(tensor: tf.Tensor, *, name: str, ranks: Ranks | None = None) -> tf.Tensor:
    """The sum over all ranks, or over `ranks`, element by element. It passes no gradient."""
    if _alone(ranks):
        return tf.stop_gradient(tensor)
    sent = _begin(tensor, name, ranks=ranks)
    total = _hvd.allreduce(sent, op=_hvd.Sum, name=_flat(name), ignore_name_scope=True, **_horovod_set(ranks))
    return tf.stop_gradient(_end(total, name))


def all_gather(array: np.ndarray) -> np.ndarray:
    """Concatenates NumPy arrays of all ranks along axis 0, in rank order. Their lengths may differ. Eager."""
    array = np.asarray(array)
    if _hvd is None:
        return array
    with _waiting("all_gather"):
        return _hvd.allgather(tf.convert_to_tensor(array), name="fusedrec.all_gather").numpy()


def all_gather_object(value: Any) -> list[Any]:
    """The picklable objects of all ranks, in rank order. Eager."""
    if _hvd is None:
        return [value]
    with _waiting("all_gather_object"):
        return _hvd.allgather_object(value, name="fusedrec.all_gather_object")


def barrier() -> None:
    """Returns when every rank has called it."""
    if _hvd is not None:
        with _waiting("barrier"):
            _hvd.allreduce(tf.zeros([]), op=_hvd.Sum, name="fusedrec.barrier")


def broadcast_variables(variables: Sequence[tf.Variable]) -> None:
    """Sets the variables, in the same order on all ranks, to rank 0's values. Eager."""
    if _hvd is None:
        return
    # Horovod caches its function for a whole list, and the function fails for a second model of the same form.
    with _waiting("broadcast_variables"):
        for number, variable in enumerate(variables):
            variable.assign(_hvd.broadcast(variable.read_value(), root_rank=0, name=f"fusedrec.broadcast.{number}"))


def equal_start(variables: Sequence[tf.Variable], steps: int, others: Sequence[weight_equality.Digest] = ()) -> bool:
    """Gives all ranks rank 0's values if no rank has trained yet, and else checks that they are equal. Collective.

    Eager. Rank 0's logger "tf_fusedrec.exchange.collectives" reports a broadcast at INFO.

    Args:
      variables: Weights, state and variables of the optimizer, in the same order on all ranks.
      steps: Number of steps that the optimizer has made on this rank; 0 at a first start.
      others: Digests of what no broadcast can make equal.

    Returns:
      Whether ranks have got values of rank 0.

    Raises:
      RuntimeError: ranks differ that have trained or loaded a checkpoint, or ranks hold different models.
    """
    if _hvd is None:
        return False
    told = all_gather_object((steps, [*weight_equality.digests(weight_equality.values_of(variables)), *others]))
    differs = weight_equality.difference_at_start(*zip(*told))
    if differs is None:
        return False
    broadcast_variables(variables)
    if rank() == 0:
        _LOG.info("before the first step %s; all ranks have rank 0's values now", differs)
    return True


def distributed_optimizer(
    optimizer: keras.optimizers.Optimizer, *, accumulate_steps: int = 1
) -> keras.optimizers.Optimizer:
    """An optimizer for dense weights that averages their gradients over ranks. One process gets `optimizer` itself.

    `fit`, `minimize` and `apply_gradients` all average. The mean weighs ranks equally, not samples. If batches of ranks
    differ in size, use a PipelinedModel, schedules.weigh_by_samples(model) or losses.global_mean.

    Rank 0 broadcasts its weights while the first step is traced, before the step runs. An eager loop has no trace, so
    its first gradients belong to each rank's own weights. Frozen weights and constants that the trace of the first step
    does not read before `apply_gradients` need broadcast_variables. Weights that have been trained are compared
    instead, see equal_start.

    Each gradient travels while the backward pass goes on. Horovod fuses gradients that are ready together.

    Args:
      optimizer: Optimizer of tf_keras, of either kind.
      accumulate_steps: k, number of steps whose mean gradient makes one update, as in FusedEmbedding. A PipelinedModel
        takes the number of its layers by itself. Gradients travel once in k steps.
    """
    made = optimizer if _hvd is None else averaging(optimizer, _averaged, equal_start)
    accumulate(made, accumulate_steps)
    return made


def _averaged(gradient: Any) -> Any:
    """The mean over ranks. The collective has the tensor's name, which is the same on all ranks in a traced step."""
    if not isinstance(gradient, tf.Tensor) or not tf.is_symbolic_tensor(gradient):  # slices, or no traced step
        return _hvd.allreduce(gradient, op=_hvd.Average)
    # Horovod would give the same name without the mark.
    name = "HorovodAllreduce_" + re.sub(r"[^a-zA-Z0-9_]", "_", gradient.name)
    return _end(_hvd.allreduce(_begin(gradient, name), op=_hvd.Average, name=name), name)
