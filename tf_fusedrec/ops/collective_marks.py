"""Marks of the collectives that this process begins and ends. The watchdog reads them. They change no number."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import LIBRARY_PATH, library


class Mark(NamedTuple):
    """State of one collective in this process."""

    name: str
    begun: int  # number of begins
    ended: int  # number of ends
    begun_ago_s: float  # seconds since its last begin
    ended_ago_s: float  # seconds since its last end; -0.001 for never


def mark_collective(value: tf.Tensor, *, name: str, ended: bool) -> tf.Tensor:
    """Passes a tensor through, and marks the begin or the end of a collective when the tensor is computed.

    Args:
      value: any shape and dtype.
      name: Name of the collective.
      ended: False before the collective, True behind it.

    Returns:
      The same tensor.
    """
    return library.fusedrec_mark_collective(value=value, collective=name, ended=ended)


@tf.RegisterGradient("Fusedrec>MarkCollective")
def _mark_collective_grad(_: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
    return grad


def mark_now(name: str, *, ended: bool) -> None:
    """Marks the begin or the end of a collective that Python calls."""
    _functions.fusedrec_mark_collective(name.encode(), int(ended))


def collective_marks() -> list[Mark]:
    """Returns all marks of this process, by name."""
    room = 1 << 14
    while True:
        buffer = ctypes.create_string_buffer(room)
        size = _functions.fusedrec_describe_marks(buffer, room)
        if size <= room:
            break
        room = 2 * size
    fields = [line.rsplit("\t", 4) for line in buffer.raw[:size].decode().splitlines()]
    return [
        Mark(name, int(begun), int(ended), int(begun_ago) / 1e3, int(ended_ago) / 1e3)
        for name, begun, ended, begun_ago, ended_ago in fields
    ]


_functions = ctypes.CDLL(str(LIBRARY_PATH))  # the library is loaded already: this is the same copy
_functions.fusedrec_describe_marks.restype = ctypes.c_int64
_functions.fusedrec_describe_marks.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_functions.fusedrec_mark_collective.restype = None
_functions.fusedrec_mark_collective.argtypes = [ctypes.c_char_p, ctypes.c_int]
