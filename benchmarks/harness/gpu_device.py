"""The base of the benchmarks on a GPU: the library of kernels, the clock, the best rates of the device, the report.

PyTorch provides the memory and the stream. TensorFlow is not needed. Times are medians over calls, each between two
CUDA events. Before every call, a write to a large buffer evicts the data of the call from the last-level cache. A call
and its peers take turns.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
from collections.abc import Iterable, Mapping

from benchmarks.harness.roofline import Rates
from tests.cuda.memory import Kernels, TorchMemory

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "tf_fusedrec/ops/libfusedrec_cuda.so"
_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def open_kernels() -> Kernels:
    """Opens the library of kernels.

    Raises:
      SystemExit: PyTorch, a GPU or the library is missing. The message names it.
    """
    try:
        import torch
    except ImportError as error:
        raise SystemExit("error: PyTorch is missing. Run this benchmark on a machine with PyTorch.") from error
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU, which this benchmark needs. Run it on a machine with a GPU.")
    if not LIBRARY.exists():
        raise SystemExit(f"error: {LIBRARY.name} is not built. Run FUSEDREC_CUDA=1 python setup.py build_ext --inplace")
    return Kernels(LIBRARY, TorchMemory())


def median_us(call, *, rounds: int = 50, warm_up: int = 5) -> float:
    """Returns the median time of call() in microseconds, with a cold last-level cache."""
    return medians_us({"": call}, rounds=rounds, warm_up=warm_up)[""]


def medians_us(calls: dict, *, rounds: int = 50, warm_up: int = 5) -> dict[str, float]:
    """Returns the median time of each call in microseconds, with a cold last-level cache. The calls take turns."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events: dict[str, list] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events[name] += [(begin, end)] if number >= warm_up else []
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs) for name, pairs in events.items()
    }


def rates() -> Rates:
    """Measures the device: a copy of 1 GiB, a product of two 8192 x 8192 matrices, a copy of 256 MiB from the host."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = median_us(lambda: target.copy_(source), rounds=20)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn_like(a)
    matrix_us = median_us(lambda: a @ b, rounds=20)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    link_us = median_us(lambda: target[: 1 << 28].copy_(host, non_blocking=True), rounds=20)
    return Rates(1e6 * 2 * source.numel() / copy_us, 1e6 * 2 * 8192**3 / matrix_us, 1e6 * host.numel() / link_us)


def device() -> dict[str, str]:
    """Returns name, driver and clocks from nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    line = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout.splitlines()[0]
    return dict(zip(_CLOCKS.split(","), (field.strip() for field in line.split(","))))


def options(description: str, name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the smallest case only")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / f"benchmarks/results/gpu_{name}.json")
    return parser.parse_args()


class Report:
    """Prints results and writes them to a file as they come, so that a run that is cut off leaves what it has.

    Args:
      path: The file.
      rates: Rates of the device.
      left_out: Reason by name of each peer that is not measured.
    """

    def __init__(self, path: pathlib.Path, rates: Rates, left_out: Mapping[str, str]):
        self._path, self._results = path, list[dict]()
        self._head = {"device": device(), "rates": rates._asdict(), "left_out": dict(left_out)}
        for name, reason in left_out.items():
            print(f"left out: {name}: {reason}", flush=True)

    def add(self, results: Iterable[dict]) -> None:
        """Adds the lines of one case."""
        for result in results:
            cells = (f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in result.items())
            print("  ".join(cells), flush=True)
            self._results.append(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**self._head, "results": self._results}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)
