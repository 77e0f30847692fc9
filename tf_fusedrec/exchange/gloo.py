"""The engine Gloo: all-to-alls and sums over connections of this package, the rest as the engine Horovod.

Horovod's all-to-all waits for a negotiation and for the exchange of splits. Here, a message finds its receiver by the
collective's name and the number of the call. custom_ops/gloo_exchange has the ops. Horovod starts the ranks, and
carries the addresses of the connections. It stays the only engine where NCCL moves tensors between GPUs.
"""

from __future__ import annotations

import collections
import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.horovod import Horovod, built_features

LIBRARY_PATH = pathlib.Path(ops.__file__).with_name("_fusedrec_gloo.so")
_CONNECT_WITHIN_MS = 60_000
_ADDRESS_BYTES = 1024  # room for one
_SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)


class Gloo(Horovod):
    """Collectives of joined ranks with other all-to-alls, as collectives.Exchange describes them.

    Raises:
      RuntimeError: a connection fails.
    """

    name = "gloo"
    joined_bytes = 1 << 18  # a few layers, so that gradients travel under the rest of the backward pass
    joined_from = 8  # fewer gain little, and rows of a group travel under the lookups of others

    def __init__(self, joined: Horovod):
        vars(self).update(vars(joined))
        self._connect()

    @classmethod
    def obstacle(cls, exchange: str | None, has_store: bool) -> str | None:
        """Returns what keeps this rank from the engine, with a remedy; None if nothing does."""
        if "HOROVOD_TIMELINE" in os.environ:
            return "a timeline is wanted, and Horovod does not record Gloo's all-to-alls. Use timeline=False"
        if not has_store:
            return "the launcher has no store, by which the ranks of a lost one end. Use horovodrun"
        if exchange is None and "nccl" in built_features():
            return "NCCL moves the tensors of GPUs"
        try:
            tf.load_op_library(str(LIBRARY_PATH))
        except tf.errors.NotFoundError as error:  # also for a symbol of a different TensorFlow
            return f"its library does not load ({error}). Use `python -m tools.gloo_sources` in a clone, then build it"
        return None

    def _connect(self) -> None:
        """Connects each rank to all others, at the interface that horovodrun has chosen. Collective."""
        self._ops = tf.load_op_library(str(LIBRARY_PATH))
        functions = ctypes.CDLL(str(LIBRARY_PATH))  # the same copy
        functions.fusedrec_exchange_listen.restype = functions.fusedrec_exchange_connect.restype = ctypes.c_char_p
        room, used = _ADDRESS_BYTES * self.size, ctypes.c_int64()
        address = ctypes.create_string_buffer(room)
        interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
        failure = functions.fusedrec_exchange_listen(
            interface.encode(), self.rank, self.size, ctypes.c_int64(_CONNECT_WITHIN_MS), address,
            ctypes.c_int64(room), ctypes.byref(used),
        )  # fmt: skip
        self._check(failure, f"to listen at interface {interface!r}")
        answers = self.all_gather_object((address.raw[: used.value], self.host))
        self._hosts = [host for _, host in answers]  # by rank
        addresses = b"".join(of_rank for of_rank, _ in answers)
        self._check(functions.fusedrec_exchange_connect(addresses, ctypes.c_int64(len(addresses))), "to connect")

    def _check(self, failure: bytes | None, purpose: str) -> None:
        if failure is not None:
            raise RuntimeError(
                f"The exchange over Gloo failed {purpose} on rank {self.rank}: {failure.decode()}. Use horovodrun "
                "--network-interfaces with an interface that reaches all hosts, or exchange='horovod'."
            )

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], splits: Sequence[tf.Tensor], received_splits: Sequence[tf.Tensor], *,
        name: str, ranks: tuple[int, ...],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
        collective: dict[str, Any] = {"collective": name, "ranks": ranks}
        shapes = [tensor.shape[1:] for tensor in tensors]
        if received_splits and all(shape.is_fully_defined() for shape in shapes):
            # The op depends on the splits alone, so it runs long before the rows exist.
            received_splits = self._ops.fusedrec_exchange_expect(
                received_splits, T=[tensor.dtype for tensor in tensors], row_shapes=shapes, **collective
            )
        # Named as Horovod's op, without a scope.
        op_name = name.replace("/", ".")
        return self._ops.fusedrec_exchange_all_to_all(tensors, splits, received_splits, **collective, name=op_name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, ranks: tuple[int, ...]) -> tf.Tensor:
        if not self._can_sum(tensor):
            return super().all_reduce(tensor, name=name, ranks=ranks)
        return self._sum([tensor], name=name, ranks=ranks, mean=False)[0]

    def average(self, gradients: Sequence[Any], *, name: str | None) -> list[Any]:
        if name is None or not all(map(self._can_sum, gradients)):
            return super().average(gradients, name=name)
        return self._sum(gradients, name=name, ranks=tuple(range(self.size)), mean=True)

    @staticmethod
    def _can_sum(tensor: Any) -> bool:
        return isinstance(tensor, tf.Tensor) and tensor.dtype in _SUMMED and tensor.shape.is_fully_defined()

    def _sum(self, tensors: Sequence[tf.Tensor], *, name: str, ranks: tuple[int, ...], mean: bool) -> list[tf.Tensor]:
        of_hosts = collections.Counter(self._hosts[rank] for rank in ranks).values()
        return self._ops.fusedrec_exchange_sum(
            tensors, collective=name, ranks=ranks, mean=mean, name=name.replace("/", "."),
            ranks_of_host=len(ranks) if len(set(of_hosts)) > 1 else next(iter(of_hosts)),
        )  # fmt: skip


def choose(joined: Horovod, exchange: str | None, *, has_store: bool, engine: type[Gloo] = Gloo) -> Horovod:
    """Returns the engine of the ranks that `joined` has joined. Collective.

    Args:
      exchange: Name of the engine, the same on all ranks; None: Gloo where nothing keeps a rank from it.
      has_store: The launcher has a store, by which the ranks of a lost one end.
      engine: The class of the engine if it is not Horovod.

    Raises:
      ValueError: the ranks name different engines, or one cannot use the named engine.
      RuntimeError: a connection of Gloo fails.
    """
    obstacle = None if exchange == Horovod.name else engine.obstacle(exchange, has_store)
    answers = joined.all_gather_object((exchange, obstacle))
    names = [name for name, _ in answers]
    if len(set(names)) > 1:
        raise ValueError(
            f"exchange must be the same on all ranks, got {names} by rank. Use one engine in tf_fusedrec.init or in "
            "FUSEDREC_EXCHANGE."
        )
    obstacles = [f"on rank {rank} {obstacle}" for rank, (_, obstacle) in enumerate(answers) if obstacle is not None]
    if exchange is not None and obstacles:
        simpler: Any = engine.__base__
        raise ValueError(f"exchange must be {simpler.name!r}, got {exchange!r}, because {obstacles[0]}.")
    return joined if obstacles or exchange == Horovod.name else engine(joined)
