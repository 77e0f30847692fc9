"""Runs the cases of the benchmarks on a GPU over the emulation: python -m tests.gpu.benchmarks_over_emulation FOLDER.

FOLDER has the emulated libraries. Checks, calls and fields are real, sizes are small. A clock that tells the time of
no device takes the place of CUDA's. The peers need a GPU and are left out.
"""

from __future__ import annotations

import pathlib
import sys
from unittest import mock

from benchmarks.gpu_attention import __main__ as attention
from benchmarks.gpu_recovery import __main__ as recovery
from benchmarks.gpu_segment_unique import __main__ as segment_unique
from benchmarks.gpu_table import __main__ as table
from benchmarks.harness import gpu_device
from benchmarks.harness.gpu_peers import Libraries
from benchmarks.harness.roofline import Rates
from tests.cuda.memory import Kernels, NumpyMemory

RATES = Rates(2e12, 6e14, 5e10)
NONE = Libraries([])
OPS = ("segment_unique", "recovery", "hash_table", "jagged_attention")


def called_once(calls, *, rounds=50, warm_up=5):
    """Takes the place of gpu_device.medians_us."""
    for call in calls.values():
        call()
    return dict.fromkeys(calls, 100.0)


def names_of(lines):
    for line in lines:
        assert line["us"] == 100.0 and line["bound_us"] > 0
        assert abs(line["fraction_of_bound"] * line["us"] - line["bound_us"]) < 1e-9 * line["bound_us"]
    return [line["name"] for line in lines]


def main(folder: pathlib.Path) -> int:
    kernels = {op: Kernels(folder / f"{op}.so", NumpyMemory()) for op in OPS}
    small = {"num_ids": 300, "lines": 64}
    with mock.patch.object(gpu_device, "medians_us", called_once):
        assert names_of(segment_unique.measure(kernels["segment_unique"], 2000, RATES, NONE)) == ["segment_unique"]
        lines = recovery.measure(kernels["recovery"], 1500, 70, 8, RATES, NONE)
        assert names_of(lines) == ["recover", "recover_grad"]
        lines = table.measure_find(kernels["hash_table"], 8, 0.5, RATES, NONE, **small)
        assert names_of(lines) == ["find numbers", "find"] and lines[1]["published_G_rows_per_s"]
        lines = table.measure_step(kernels["hash_table"], 8, RATES, NONE, **small)
        assert names_of(lines) == ["lookup", "update", "lookup and update"] and lines[2]["published"]
        lines = table.measure_buffers(kernels["hash_table"], 8, RATES, rows=40)
        assert names_of(lines) == ["rows to a buffer", "the next batch, rows back"]
        assert [line["bound_by"] for line in lines] == ["host_bytes", "host_bytes"]
    with (
        mock.patch.object(gpu_device, "medians_us", called_once),
        mock.patch.object(attention, "lengths_of_rows", lambda random, longest: [longest, 0, longest // 2]),
    ):
        lines = attention.measure(kernels["jagged_attention"], 64, 40, True, RATES, NONE)
        assert names_of(lines) == ["forward", "backward"] and lines[1]["flops"] == 2.5 * lines[0]["flops"]
    print("the cases of the benchmarks run")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
