"""The engine Gloo: all-to-alls over connections of this package, everything else as the engine Horovod.

Horovod's all-to-all waits for a negotiation and for the exchange of splits. Here, a message finds its receiver by the
collective's name and the number of the call. custom_ops/gloo_exchange has the ops. Horovod starts the ranks, and
carries the addresses of the connections.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange.horovod import Horovod

LIBRARY_PATH = pathlib.Path(ops.__file__).with_name("_fusedrec_gloo.so")
_CONNECT_WITHIN_MS = 60_000
_ADDRESS_BYTES = 1024  # room for one


class Gloo(Horovod):
    """Collectives of Horovod with other all-to-alls, as collectives.Exchange describes them."""

    name = "gloo"

    def join(self, sets: Sequence[tuple[int, ...]], *, timeline: bool) -> None:
        """As Exchange.join.

        Raises:
          ImportError: the package was built without the engine's library on some rank.
          ValueError: a timeline is wanted.
          RuntimeError: a connection fails.
        """
        if timeline:
            raise ValueError(
                "exchange must be 'horovod' with timeline=True, got 'gloo', whose all-to-alls Horovod does not record. "
                "Use exchange='horovod', or timeline=False."
            )
        super().join(sets, timeline=timeline)
        self._connect()

    def _connect(self) -> None:
        """Connects each rank to all others, at the interface that horovodrun has chosen. Collective."""
        has_library = self.all_gather_object(LIBRARY_PATH.exists())
        if not all(has_library):
            lacking = [rank for rank, has in enumerate(has_library) if not has]
            raise ImportError(
                f"exchange='gloo' needs {LIBRARY_PATH.name}, which ranks {lacking} lack: their tf_fusedrec was built "
                "without Gloo's sources. Use `python -m tools.gloo_sources` in the clone and build again, or "
                "exchange='horovod'."
            )
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
        addresses = b"".join(self.all_gather_object(address.raw[: used.value]))
        self._check(functions.fusedrec_exchange_connect(addresses, ctypes.c_int64(len(addresses))), "to connect")

    def _check(self, failure: bytes | None, purpose: str) -> None:
        if failure is not None:
            raise RuntimeError(
                f"The exchange over Gloo failed {purpose} on rank {self.rank}: {failure.decode()}. Use horovodrun "
                "--network-interfaces with an interface that reaches all hosts, or exchange='horovod'."
            )

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor, received_splits: tf.Tensor | None, *, name: str,
        ranks: tuple[int, ...],
    ) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
        collective: dict[str, Any] = {"collective": name, "ranks": ranks}
        known, row_shape = [], tensor.shape[1:]
        if received_splits is not None:
            known = [received_splits]
            if row_shape.is_fully_defined():
                # The op depends on the splits alone, so it runs long before the rows exist.
                expect = self._ops.fusedrec_exchange_expect
                known = [expect(received_splits, T=tensor.dtype, row_shape=row_shape, **collective)]
        return self._ops.fusedrec_exchange_all_to_all(tensor, splits, known, **collective)
