"""The only file that imports Horovod: all2all, all-reduce, gather, barrier; a loop-back when there is one process.

Every collective has a name, the same on all ranks: Horovod matches collectives by name, and its response cache needs
the name and the shape to come again. One process needs no Horovod at all.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf

_hvd: Any = None  # horovod.tensorflow once init() has found more than one process


def init() -> None:
    """Joins the other processes when launched under horovodrun; does nothing otherwise. May be called again.

    Raises:
      ImportError: launched with several processes, but Horovod is not installed.
    """
    global _hvd
    if _hvd is not None or int(os.environ.get("HOROVOD_SIZE", "1")) == 1:
        return
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            f"HOROVOD_SIZE is {os.environ['HOROVOD_SIZE']}, but Horovod with TensorFlow is not installed. Remedy: "
            "`make test` builds it, or run without horovodrun on one process."
        ) from error
    # Costs nothing until start_timeline; horovodrun --timeline-filename has set another one.
    os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    _hvd = hvd


def check_init() -> None:
    """Raises RuntimeError when the process was launched as one of several and init() was not called."""
    if _hvd is None and int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"This is one of {os.environ['HOROVOD_SIZE']} processes, but they have not joined. "
            "Call tf_fusedrec.init() first thing in the program."
        )


def rank() -> int:
    """Number of this process, 0 <= rank < size."""
    return _hvd.rank() if _hvd else 0


def size() -> int:
    """Number of processes, R."""
    return _hvd.size() if _hvd else 1


def _flat(name: str) -> str:
    """`name` without '/': ignore_name_scope makes Horovod drop all that stands before the last one."""
    return name.replace("/", ".")


# Horovod moves bytes, but does not list bfloat16 among the types of its all2all.
_CARRIED_AS = {tf.bfloat16: tf.int16}


def all_to_all(tensor: tf.Tensor, splits: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends slices of the first dimension to all ranks and returns what came from them, in rank order.

    Args:
      tensor: [P, ...] with P >= sum(splits); rows behind the sum are padding and stay here.
      splits: <int32>[R], rows for each rank.
      name: the same on all ranks and at every step; two all2alls in flight must differ in it.

    Returns:
      received [sum of received_splits, ...] and received_splits <int32>[R].
    """
    if _hvd is None:
        return tensor[: splits[0]], tf.identity(splits)
    carried = _CARRIED_AS.get(tensor.dtype)
    sent = tf.bitcast(tensor, carried) if carried else tensor
    received, received_splits = _hvd.alltoall(sent, splits=splits, name=_flat(name), ignore_name_scope=True)
    received = tf.bitcast(received, tensor.dtype) if carried else received
    received.set_shape([None, *tensor.shape[1:]])
    received_splits.set_shape([size()])
    return received, received_splits


def all_reduce_sum(tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sum over ranks, element by element. No gradient flows through it."""
    if _hvd is None:
        return tf.stop_gradient(tensor)
    return tf.stop_gradient(_hvd.allreduce(tensor, op=_hvd.Sum, name=_flat(name), ignore_name_scope=True))


def all_gather(array: np.ndarray) -> np.ndarray:
    """Concatenates NumPy arrays of all ranks along axis 0 (lengths may differ), in rank order. Eager."""
    array = np.asarray(array)
    if _hvd is None:
        return array
    return _hvd.allgather(tf.convert_to_tensor(array), name="fusedrec.all_gather").numpy()


def all_gather_object(value: Any) -> list[Any]:
    """Picklable objects of all ranks, in rank order. Eager."""
    return [value] if _hvd is None else _hvd.allgather_object(value, name="fusedrec.all_gather_object")


def barrier() -> None:
    """Returns when every rank has called it."""
    if _hvd is not None:
        _hvd.allreduce(tf.zeros([]), op=_hvd.Sum, name="fusedrec.barrier")


def broadcast_variables(variables: Sequence[tf.Variable]) -> None:
    """Sets the variables of all ranks to rank 0's values. The list must be in the same order on all ranks."""
    if _hvd is not None:
        _hvd.broadcast_variables(variables, root_rank=0)


def distributed_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer for dense weights: averages their gradients over ranks; itself when there is one process."""
    if _hvd is None:
        return optimizer
    import horovod.tensorflow.keras as hvd_keras

    return hvd_keras.DistributedOptimizer(optimizer)


def start_timeline(path: os.PathLike) -> None:
    """Rank 0: Horovod writes what its collectives do, until stop_timeline; nothing with one process.

    Raises:
      RuntimeError: it writes a timeline already.
    """
    if _hvd is None:
        return
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise RuntimeError(
            f"Horovod writes a timeline to {os.environ.get('HOROVOD_TIMELINE')!r} already. "
            "Remedy: leave out horovodrun --timeline-filename, or unset HOROVOD_TIMELINE."
        )
    _hvd.start_timeline(os.fspath(path))


def stop_timeline() -> None:
    """Ends what start_timeline began; the file is finished a little later."""
    if _hvd is not None:
        _hvd.stop_timeline()
