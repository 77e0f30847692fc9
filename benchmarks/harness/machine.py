"""A description of the machine that identifies neither it nor its processor, for results in the repository."""

from __future__ import annotations

import os
import pathlib
import platform


def describe(cpuinfo: str | None = None, *, gpu: bool | None = None) -> str:
    """Returns, for example, "virtual machine, 2 x86-64 cores (AVX-512), no GPU"."""
    path = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo if cpuinfo is not None else path.read_text(encoding="utf-8") if path.exists() else ""
    flags = next((line.split(":")[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    kind = "virtual machine" if "hypervisor" in flags else "machine"
    cores = text.count("processor\t") if cpuinfo is not None else os.cpu_count()
    vectors = next((name for flag, name in _VECTORS if flag in flags), "")
    gpu = pathlib.Path("/dev/nvidia0").exists() if gpu is None else gpu
    architecture = platform.machine().replace("_", "-")
    return f"{kind}, {cores} {architecture} cores{f' ({vectors})' if vectors else ''}, {'a GPU' if gpu else 'no GPU'}"


_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"))
