"""The engine NCCL: rows and sums move between GPUs, ids and splits as in the engine Gloo. No GPU has run it yet.

custom_ops/gloo_exchange/nccl_op.cc has the ops, and the order in which all ranks issue them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.gloo import LIBRARY_PATH, Gloo
from tf_fusedrec.ops._library import built_with_cuda

_VARIABLE = "FUSEDREC_NCCL_LIBRARY"


class Nccl(Gloo):
    """Collectives of all ranks, as collectives.Exchange describes them.

    Raises:
      RuntimeError: a connection fails, or NCCL does.
    """

    name = "nccl"
    joined_from = 0  # its op has one tensor

    @classmethod
    def obstacle(cls, exchange: str | None, has_store: bool) -> str | None:
        if (obstacle := super().obstacle(exchange, has_store)) is not None:
            return obstacle
        if _VARIABLE not in os.environ and not (built_with_cuda() and tf.config.list_physical_devices("GPU")):
            return "TensorFlow sees no GPU, or the ops have no GPU kernels. Use `fusedrec doctor`, which tells"
        path = _library()
        with contextlib.suppress(OSError):  # the next line reports it
            # Binds NCCL to its own functions first, because TensorFlow exports some of equal names.
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        if (failure := _functions().fusedrec_nccl_load(path.encode())) is not None:
            return f"NCCL does not load ({failure.decode()}). Use {_VARIABLE} with the path of libnccl.so.2"
        return None

    def _connect(self) -> None:
        super()._connect()
        self._device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        join, unique_id = _functions().fusedrec_nccl_join, ctypes.create_string_buffer(128)
        failure = join(unique_id) if self.rank == 0 else None
        failure, of_rank_0 = self.all_gather_object((failure, unique_id.raw))[0]
        if failure is not None:
            raise RuntimeError(f"NCCL failed on rank 0: {failure.decode()} Use exchange='gloo' without it.")
        if self.rank > 0:
            join(of_rank_0)

    def own_failure(self) -> str | None:
        """Why this rank has ended the exchange; None if it has not."""
        failure = _functions().fusedrec_exchange_own_failure()
        return None if failure is None else failure.decode()

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], splits: Sequence[tf.Tensor], received_splits: Sequence[tf.Tensor], *,
        name: str, ranks: tuple[int, ...],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:  # fmt: skip
        (tensor,), (sent,) = tensors, splits
        if not tensor.dtype.is_floating:
            return super().all_to_all(tensors, splits, received_splits, name=name, ranks=ranks)
        if not received_splits:
            ones = [tf.ones_like(sent)]
            received_splits, _ = super().all_to_all([sent], ones, ones, name=f"{name}/splits", ranks=ranks)
        all_to_all, (known,) = self._ops.fusedrec_nccl_all_to_all, received_splits
        with tf.device(self._device):
            received = all_to_all(tensor, sent, known, collective=name, ranks=ranks, name=name.replace("/", "."))
        return [received], [tf.identity(known)]

    def _sum(self, tensors: Sequence[tf.Tensor], *, name: str, ranks: tuple[int, ...], mean: bool) -> list[tf.Tensor]:
        if any(tensor.dtype == tf.int32 for tensor in tensors):  # TensorFlow has them in host memory
            return super()._sum(tensors, name=name, ranks=ranks, mean=mean)
        options: dict[str, Any] = {"collective": name, "ranks": ranks, "name": name.replace("/", ".")}
        with tf.device(self._device):
            sums = self._ops.fusedrec_nccl_sum(tensors, **options)
            return [total / self.size for total in sums] if mean else sums


def _functions() -> ctypes.CDLL:
    functions = ctypes.CDLL(str(LIBRARY_PATH))
    functions.fusedrec_nccl_load.restype = functions.fusedrec_nccl_join.restype = ctypes.c_char_p
    functions.fusedrec_exchange_own_failure.restype = ctypes.c_char_p
    return functions


def _library() -> str:
    """Returns the NCCL that the environment names, or that of pip's package, or the system's."""
    installed = (pathlib.Path(folder, "nvidia/nccl/lib/libnccl.so.2") for folder in sys.path)
    return os.environ.get(_VARIABLE) or next((str(path) for path in installed if path.exists()), "libnccl.so.2")
