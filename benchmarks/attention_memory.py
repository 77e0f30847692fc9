"""Peak memory of one forward and backward pass, in a process of its own: how far the high-water mark rises."""

from __future__ import annotations

import pathlib
import re

from benchmarks import children
from benchmarks.attention_batch import LONGEST, Batch, long_tailed

ROWS = 4  # the padded contender has all of them in memory at once


def _kilobytes(field: str) -> int:
    found = re.search(
        rf"^{field}:\s+(\d+) kB$", pathlib.Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found.group(1)) if found else 0


def main(contender: str) -> float:
    """Bytes above what the process held before, contender "ours" or "padded"."""
    batch = Batch(long_tailed(ROWS), bias=False)
    if contender == "ours":
        call = batch.ours()["fwd_bwd"]
    else:
        call = batch.peer(xla=False, most_pairs=ROWS * LONGEST**2)[0].both
    before = _kilobytes("VmRSS")
    call()
    return 1024.0 * (_kilobytes("VmHWM") - before)


if __name__ == "__main__":
    children.answer(main)
