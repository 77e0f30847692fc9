"""The base of the benchmarks on a GPU: the library of kernels, the clock, and the best rates of the device.

PyTorch provides the memory and the stream. TensorFlow is not needed. Times are medians over calls, each between two
CUDA events. Before every call, a write to a large buffer evicts the data of the call from the last-level cache.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess

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


def copy_bytes_per_s() -> float:
    """Returns the bytes that a copy of 1 GiB reads and writes per second."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_us(lambda: target.copy_(source), rounds=20) * 1e-6)


def matrix_flops() -> float:
    """Returns the bfloat16 operations per second of a product of two 8192 x 8192 matrices."""
    import torch

    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn_like(a)
    return 2 * 8192**3 / (median_us(lambda: a @ b, rounds=20) * 1e-6)


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


def write(path: pathlib.Path, results: list[dict]) -> None:
    """Prints the results and writes them to a file, together with the device."""
    for result in results:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device(), "results": results}, indent=1) + "\n", encoding="utf-8")
