"""The memory of this process, as the kernel counts it."""

from __future__ import annotations

import pathlib
import re


def kilobytes(field: str) -> int:
    """Returns a field of /proc/self/status, such as "VmRSS" (resident) or "VmHWM" (its highest value)."""
    found = re.search(
        rf"^{field}:\s+(\d+) kB$", pathlib.Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found.group(1)) if found else 0
