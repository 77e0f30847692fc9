"""The base of the benchmarks on a GPU: the library of kernels, the clock, rates and bounds, peers.

PyTorch provides the memory and the stream. TensorFlow is not needed. Times are medians over calls, each between two
CUDA events. Before every call, a write to a large buffer evicts the data of the call from the last-level cache. A call
and its peers take turns. A peer has the arrays of our call and runs on the same stream.

    bound = max(bytes / copy rate, operations / matrix rate, bytes from or to the host / rate of the link)

is the least time in which a device can move the bytes of a call and do its operations. The rates are measured on the
same device in the same process. Data that stay in the caches may take less.
"""

from __future__ import annotations

import importlib
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.harness.harness import ROOT
from tests.cuda.memory import Kernels, TorchMemory

LIBRARY = ROOT / "tf_fusedrec/ops/libfusedrec_cuda.so"
_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


class Rates(NamedTuple):
    """Measured rates of a device."""

    copy_bytes_per_s: float  # bytes read plus written by a copy in device memory
    matrix_flops: float  # bfloat16 operations per second of a large matrix product
    link_bytes_per_s: float  # bytes of a copy from pinned host memory to the device


class Work(NamedTuple):
    """The least work of a call, for any implementation."""

    bytes: int = 0  # read plus written in device memory
    flops: float = 0.0
    host_bytes: int = 0  # copied between host memory and the device


class Call(NamedTuple):
    run: Callable[[], Any]
    work: Work
    check: Callable[[], None] = lambda: None  # raises AssertionError if the results of `run` are wrong


def libraries(names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the modules of peers by name, and the reason for each that cannot be imported."""
    modules, left_out = {}, {}
    for name in names:
        try:
            modules[name] = importlib.import_module(name)
        except Exception as error:  # a library for another CUDA fails in many ways
            left_out[name] = f"{type(error).__name__}: {error}"
    return modules, left_out


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


def medians_us(calls: Mapping[str, Callable[[], Any]], *, rounds: int = 20, warm_up: int = 5) -> dict[str, float]:
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
    return {name: statistics.median(b.elapsed_time(e) * 1e3 for b, e in pairs) for name, pairs in events.items()}


def measured_rates() -> Rates:
    """Measures the device: a copy of 1 GiB, a product of two 8192 x 8192 matrices, a copy of 256 MiB from the host."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source), "matrix": lambda: a @ b,
        "link": lambda: target[: 1 << 28].copy_(host, non_blocking=True),
    }  # fmt: skip
    copy_us, matrix_us, link_us = (medians_us({name: call})[name] for name, call in calls.items())
    return Rates(1e6 * 2 * source.numel() / copy_us, 1e6 * 2 * 8192**3 / matrix_us, 1e6 * host.numel() / link_us)


def bounded(us: float, work: Work, rates: Rates) -> dict[str, Any]:
    """Returns a time with its bound: us, bytes, flops, host_bytes, bound_us, bound_by and fraction_of_bound.

    Raises:
      ValueError: The call has no work, so it has no bound.
    """
    times = {
        "bytes": work.bytes / rates.copy_bytes_per_s, "flops": work.flops / rates.matrix_flops,
        "host_bytes": work.host_bytes / rates.link_bytes_per_s,
    }  # fmt: skip
    bound_by = max(times, key=lambda name: times[name])
    if times[bound_by] <= 0:
        raise ValueError(f"a call needs bytes, flops or host_bytes above 0 to have a bound, got {work}.")
    bound_us = 1e6 * times[bound_by]
    return {"us": us, **work._asdict(), "bound_us": bound_us, "bound_by": bound_by, "fraction_of_bound": bound_us / us}


def timed(calls: Mapping[str, Call], rates: Rates, **fields: Any) -> list[dict[str, Any]]:
    """Checks the calls, then times them in turns. Returns a line for each: its name, `fields`, times and bounds."""
    for call in calls.values():
        call.check()
    times = medians_us({name: call.run for name, call in calls.items()})
    return [{"name": name, **fields, **bounded(us, calls[name].work, rates)} for name, us in times.items()]


def device() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
    return dict(zip(_CLOCKS.split(","), (field.strip() for field in told.splitlines()[0].split(","))))
