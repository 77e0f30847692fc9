"""The end of this process by C++, such as an exception in Horovod's thread. collective_marks/termination.h says why."""

from __future__ import annotations

import ctypes

from tf_fusedrec.ops._library import LIBRARY_PATH

_ROOM = 512


def watch_termination(rank: int, within_s: float) -> None:
    """Delays the end of this process by std::terminate, so that a thread can read its cause and end the process itself.

    Args:
      rank: Rank of this process, for the line that is printed if no thread ends the process.
      within_s: Seconds after which the process ends with code 1.
    """
    _functions.fusedrec_watch_termination(rank, within_s)


def termination() -> str | None:
    """Returns the text of the exception that ends this process; None while no such end has come."""
    buffer = ctypes.create_string_buffer(_ROOM)
    if not _functions.fusedrec_termination(buffer, _ROOM):
        return None
    return buffer.value.decode(errors="replace")


_functions = ctypes.CDLL(str(LIBRARY_PATH))  # the library is loaded already: this is the same copy
_functions.fusedrec_watch_termination.restype = None
_functions.fusedrec_watch_termination.argtypes = [ctypes.c_int, ctypes.c_double]
_functions.fusedrec_termination.restype = ctypes.c_int
_functions.fusedrec_termination.argtypes = [ctypes.c_char_p, ctypes.c_int64]
