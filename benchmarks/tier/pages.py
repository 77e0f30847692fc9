"""The pages of a table's files of rows: removes them from memory, and counts the bytes read from a disk."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re

import numpy as np

from benchmarks.harness import harness

_MS_SYNC, _MADV_PAGEOUT = 4, 21
_libc = ctypes.CDLL(None, use_errno=True)


def _file_mappings() -> list[tuple[int, int]]:
    """Returns (address, bytes) of the mapped files of rows of this process."""
    lines = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [re.match(r"([0-9a-f]+)-([0-9a-f]+)", line) for line in lines if "/fusedrec-rows-" in line]
    spans = [(int(found[1], 16), int(found[2], 16)) for found in ranges if found]
    return [(begin, end - begin) for begin, end in spans]


def give_up_pages() -> float:
    """Writes back the files of rows and removes their pages from memory. Returns the share of pages that stayed."""
    pages = resident = 0
    for address, size in _file_mappings():
        for call, flag in ((_libc.msync, _MS_SYNC), (_libc.madvise, _MADV_PAGEOUT)):
            if call(ctypes.c_void_p(address), ctypes.c_size_t(size), flag) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise harness.CheckFailed(f"The tier's pages stay in memory: {reason}. Use Linux 5.4 or later.")
        present = (ctypes.c_ubyte * (size // 4096))()
        _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present)
        pages += len(present)
        resident += int(np.sum(np.ctypeslib.as_array(present) & 1))
    return resident / max(pages, 1)


def bytes_read() -> int:
    """Returns the bytes that this process has read from disks."""
    found = re.search(r"^read_bytes: (\d+)$", pathlib.Path("/proc/self/io").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found.group(1)) if found else 0
