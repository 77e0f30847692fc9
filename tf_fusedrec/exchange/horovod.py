"""The engine Horovod: collectives, process sets and the timeline.

tools/horovod.patch changes Horovod's queue and Gloo's loop for ranks that share cores. Without it, the loop spins while
another thread has the lock of a connection.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf

# Horovod's all-to-all moves bytes, but does not accept bfloat16.
_CARRIED_AS = {tf.bfloat16: tf.int16}
_FEATURES = ("gloo", "mpi", "nccl", "cuda", "rocm", "ccl", "ddl")

_hvd: Any = None  # the module horovod.tensorflow, once this process has joined others


class Horovod:
    """Collectives of Horovod, as collectives.Exchange describes them.

    Raises:
      ImportError: Horovod is not installed, or was built for a different TensorFlow.
    """

    name = "horovod"
    joined_bytes = joined_from = 0  # Horovod joins gradients that are ready together
    rank: int
    size: int
    host: int  # its number

    def __init__(self) -> None:
        try:
            import horovod.tensorflow as hvd
        except (ImportError, tf.errors.NotFoundError) as error:  # NotFoundError: a symbol of a different TensorFlow
            raise ImportError(
                f"HOROVOD_SIZE is {os.environ['HOROVOD_SIZE']}, but no Horovod for TensorFlow {tf.version.VERSION} "
                f"loads ({str(error).splitlines()[0]}). Use `python -m tools.horovod_wheel` in a clone, or start one "
                "process without horovodrun."
            ) from error
        self._hvd = hvd
        self._process_sets: dict[tuple[int, ...], Any] = {}

    def join(self, sets: Sequence[tuple[int, ...]], *, timeline: bool) -> None:
        """Joins the other processes. `sets` are the sets of ranks that will run collectives, ascending."""
        global _hvd
        if timeline:
            # horovodrun --timeline-filename has set a different value, which check_timeline refuses.
            os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
        # Milliseconds between two cycles with collectives. Horovod's default, 1, is a large part of a step.
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")
        process_sets = {ranks: self._hvd.ProcessSet(list(ranks)) for ranks in sets}
        self._hvd.init(process_sets=list(process_sets.values()) or None)
        if self._hvd.gloo_enabled():  # mpirun may have bound the rank to cores of its own
            # With a thread per core in every rank, TensorFlow's choice, the ranks of a host wake each other for tiny
            # ops. TensorFlow reads the variable at its first op.
            threads = max(1, len(os.sched_getaffinity(0)) // self._hvd.local_size())
            os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
        self._process_sets = process_sets
        self.rank, self.size, self.host = self._hvd.rank(), self._hvd.size(), self._hvd.cross_rank()
        _hvd = self._hvd

    def _options(self, name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
        """The keywords of a collective."""
        # ignore_name_scope makes Horovod drop the part before the last "/".
        options: dict[str, Any] = {"name": name.replace("/", "."), "ignore_name_scope": True}
        if ranks in self._process_sets:
            options["process_set"] = self._process_sets[ranks]
        return options

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], splits: Sequence[tf.Tensor], received_splits: Sequence[tf.Tensor], *,
        name: str, ranks: tuple[int, ...],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
        (tensor,) = tensors
        carried = _CARRIED_AS.get(tensor.dtype)
        sent = tf.bitcast(tensor, carried) if carried else tensor
        received, received_splits = self._hvd.alltoall(sent, splits=splits[0], **self._options(name, ranks))
        return [tf.bitcast(received, tensor.dtype) if carried else received], [received_splits]

    def all_reduce(self, tensor: tf.Tensor, *, name: str, ranks: tuple[int, ...]) -> tf.Tensor:
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, **self._options(name, ranks))

    def average(self, gradients: Sequence[Any], *, name: str | None) -> list[Any]:
        # With its scope, because gradients of two functions in one graph may have equal names.
        (gradient,) = gradients
        return [self._hvd.allreduce(gradient, op=self._hvd.Average, name=name)]

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._hvd.allgather_object(value, name="fusedrec.all_gather_object")

    def broadcast(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        # One by one: Horovod caches its function for a list, and the function fails for a second model of equal form.
        return self._hvd.broadcast(tensor, root_rank=0, name=name)


def built_features() -> list[str]:
    """Names of the features that Horovod was built with; none before several processes join."""
    return [name for name in _FEATURES if _hvd is not None and getattr(_hvd, f"{name}_built")()]


def check_timeline() -> None:
    """Raises RuntimeError unless the processes joined with a timeline, or there is one process."""
    setting = os.environ.get("HOROVOD_TIMELINE")
    if _hvd is None or setting == "DYNAMIC":
        return
    if setting is None:
        raise RuntimeError(
            "The processes have joined without a timeline. Use tf_fusedrec.init(timeline=True) when they join, or "
            "HOROVOD_TIMELINE=DYNAMIC in the environment of all processes."
        )
    raise RuntimeError(
        f"Horovod writes a timeline to {setting!r} already. Use horovodrun without --timeline-filename, and unset "
        "HOROVOD_TIMELINE."
    )


def start_timeline(path: os.PathLike | str) -> None:
    """Starts to record the collectives in a file of rank 0. Does nothing with one process.

    Raises:
      RuntimeError: As check_timeline.
    """
    check_timeline()
    if _hvd is not None:
        _hvd.start_timeline(os.fspath(path))


def stop_timeline() -> None:
    """Ends the record. Horovod completes the file a little later."""
    if _hvd is not None:
        _hvd.stop_timeline()
