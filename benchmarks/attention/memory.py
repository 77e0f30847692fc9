"""Peak memory of one forward and backward pass, in a process of its own: the rise of the high-water mark."""

from __future__ import annotations

from benchmarks.attention.batch import LONGEST, Batch, long_tailed
from benchmarks.harness import children
from benchmarks.harness.memory import kilobytes

ROWS = 4  # the padded peer holds all of them in memory at once


def main(variant: str) -> float:
    """Returns the bytes that the passes of `variant` ("ours" or "padded") add to the memory of the process."""
    batch = Batch(long_tailed(ROWS), bias=False)
    if variant == "ours":
        call = batch.ours()["fwd_bwd"]
    else:
        call = batch.peer(xla=False, most_pairs=ROWS * LONGEST**2)[0].both
    before = kilobytes("VmRSS")
    call()
    return 1024.0 * (kilobytes("VmHWM") - before)


if __name__ == "__main__":
    children.answer(main)
