"""Runs the cases of the benchmarks on a GPU over the emulation: python -m tests.gpu.benchmarks_over_emulation LIBRARY.

LIBRARY has the emulated kernels. Checks, calls and fields are real, sizes are small. A clock that tells the time of
no device takes the place of CUDA's. The peers need a GPU and are left out.
"""

from __future__ import annotations

import pathlib
import sys
from unittest import mock

from benchmarks.harness import gpu
from benchmarks.harness.gpu import Rates
from benchmarks.ops import gpu as cases
from tests.cuda.memory import Kernels, NumpyMemory

RATES = Rates(2e12, 6e14, 5e10)
NONE = {}


def called_once(calls, *, rounds=20, warm_up=5):
    """Takes the place of gpu.medians_us."""
    for call in calls.values():
        call()
    return dict.fromkeys(calls, 100.0)


def names_of(lines):
    for line in lines:
        assert line["us"] == 100.0 and line["bound_us"] > 0
        assert abs(line["fraction_of_bound"] * line["us"] - line["bound_us"]) < 1e-9 * line["bound_us"]
    return [line["name"] for line in lines]


def main(library: pathlib.Path) -> int:
    kernels = Kernels(library, NumpyMemory())
    small = {"num_ids": 300, "lines": 64}
    with mock.patch.object(gpu, "medians_us", called_once):
        assert names_of(cases.segment_unique(kernels, RATES, NONE, 2000)) == ["segment_unique"]
        lines = cases.recovery(kernels, RATES, NONE, 1500, 70, 8)
        assert names_of(lines) == ["recover", "recover_grad"]
        lines = cases.find_rows(kernels, RATES, NONE, 8, **small)
        assert names_of(lines) == ["find numbers", "find"] * 2 and lines[1]["published_G_rows_per_s"]
        lines = cases.train(kernels, RATES, NONE, 8, **small)
        assert names_of(lines) == ["lookup", "update", "lookup and update"] and lines[2]["published"]
        lines = cases.exchange(kernels, RATES, NONE, 8, rows=40)
        assert names_of(lines) == ["rows to a buffer", "the next batch, rows back"]
        assert [line["bound_by"] for line in lines] == ["host_bytes", "host_bytes"]
    with (
        mock.patch.object(gpu, "medians_us", called_once),
        mock.patch.object(cases, "lengths_of_rows", lambda random, longest: [longest, 0, longest // 2]),
    ):
        lines = cases.attention(kernels, RATES, NONE, 64, 40, True)
        assert names_of(lines) == ["forward", "backward"] and lines[1]["flops"] == 2.5 * lines[0]["flops"]
    print("the cases of the benchmarks run")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
