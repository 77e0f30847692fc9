"""The base of every benchmark: command line, interleaved timing, checks that end the run, table, JSON, machine, ids.

A benchmark checks its result, then measures, then prints. Its variants take turns inside every repeat, so that a
disturbance of the machine hits all of them. It reports medians and 90th percentiles. This module needs NumPy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
_VECTORS = (("amx_tile", "AVX-512, AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))


class CheckFailed(Exception):
    """A variant's result differs from the expected one, so that nothing is measured."""


class Timing(NamedTuple):
    """Wall-clock times of one variant, in seconds."""

    median_s: float
    p90_s: float


def parser(description: str | None, quick: str = "fewer cases and repeats") -> argparse.ArgumentParser:
    """Returns the parser of --quick and --json FILE, described by the first line of a module's docstring."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0], allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE")
    return made


def timing(seconds: Sequence[float] | np.ndarray) -> Timing:
    return Timing(float(np.median(seconds)), float(np.percentile(seconds, 90)))


def in_turns(names: Sequence[str], repeats: int, warmup: int = 0) -> Iterator[tuple[int, str]]:
    """Yields (repeat, name). Each repeat has all names and starts with another one. A warm-up has repeats below 0."""
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            yield repeat, name


def measure(variants: Mapping[str, Callable[[], object]], *, warmup: int, repeats: int) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat, name in in_turns(list(variants), repeats, warmup):
        begin = time.perf_counter()
        variants[name]()
        if repeat >= 0:
            seconds[name].append(time.perf_counter() - begin)
    return {name: timing(values) for name, values in seconds.items()}


def check_equal(what: str, got: Any, want: Any) -> None:
    """Raises CheckFailed unless two arrays are equal. Its message has NumPy's list of differences: x got, y wanted."""
    _check(what, np.testing.assert_array_equal, got, want)


def check_close(
    what: str, got: Any, want: Any, *, relative: float, reason: str = "float32 sums in another order"
) -> None:
    """Raises CheckFailed unless max |got - want| <= relative * max |want|. `reason` justifies the tolerance."""
    want = np.asarray(want, np.float64)
    limit = relative * np.max(np.abs(want), initial=0.0)
    what = f"{what} (tolerated: {reason})"
    _check(what, np.testing.assert_allclose, np.asarray(got, np.float64), want, rtol=0, atol=limit, equal_nan=False)


def _check(what: str, compare: Callable[..., None], got: Any, want: Any, **options: Any) -> None:
    try:
        compare(got, want, **options)
    except AssertionError as error:
        raise CheckFailed(f"{what}:{error}") from None


class Copy:
    """A copy of a buffer by `threads` threads, each of which copies one part. A call runs it.

    The parts are so large that memcpy bypasses the caches. This is its fastest way, so that the floor is a true bound.
    """

    def __init__(self, threads: int, megabytes_each: int = 256):
        source = np.ones(threads * megabytes_each << 17, np.int64)  # 2^20 bytes are 2^17 numbers
        target = np.empty_like(source)
        self.bytes_moved = 2 * source.nbytes  # read and written
        self._parts = list(zip(np.array_split(target, threads), np.array_split(source, threads)))

    def __call__(self) -> None:
        copies = [threading.Thread(target=np.copyto, args=part) for part in self._parts[1:]]
        for copy in copies:
            copy.start()
        np.copyto(*self._parts[0])
        for copy in copies:
            copy.join()


def kilobytes(field: str) -> int:
    """Returns a field of /proc/self/status, such as "VmRSS" (resident) or "VmHWM" (its highest value)."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found.group(1)) if found else 0


def count_nodes(graph: Any, *ops: str) -> int:
    """Counts the nodes of some ops in a GraphDef. A function's nodes count once for every node that calls it."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}

    def called(node: Any) -> Iterator[str]:
        """Yields the functions that a node calls by its op or by an attribute (PartitionedCall, While, If)."""
        yield node.op
        for attribute in node.attr.values():
            if attribute.HasField("func"):
                yield attribute.func.name
            yield from (function.name for function in attribute.list.func)

    def count(nodes: Iterable[Any]) -> int:
        inside = sum(count(bodies[name]) for node in nodes for name in called(node) if name in bodies)
        return inside + sum(node.op in ops for node in nodes)

    return count(graph.node)


def describe_machine() -> str:
    """Returns, for example, "virtual machine, 2 x86-64 cores (AVX-512), no GPU". It identifies no machine."""
    path = pathlib.Path("/proc/cpuinfo")
    flags = path.read_text(encoding="utf-8").split() if path.exists() else []
    kind = "virtual machine" if "hypervisor" in flags else "machine"
    vectors = next((f" ({name})" for flag, name in _VECTORS if flag in flags), "")
    gpu = "a GPU" if pathlib.Path("/dev/nvidia0").exists() else "no GPU"
    return f"{kind}, {os.cpu_count()} {platform.machine().replace('_', '-')} cores{vectors}, {gpu}"


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False).stdout.strip()


def commit() -> str:
    found = _git("rev-parse", "--short", "HEAD")
    if not re.fullmatch(r"[0-9a-f]{4,40}", found):
        return "not committed"
    return f"{found}, with changes" if _git("status", "--porcelain") else found


def environment() -> dict[str, Any]:
    """Returns the machine and the commit of a measurement. A high `load_average` reveals other work."""
    load = round(os.getloadavg()[0], 2)
    return {
        "machine": describe_machine(), "load_average": load, "python": platform.python_version(), "commit": commit()
    }  # fmt: skip


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows under the keys of all rows."""
    print(f"\n{title}")
    if not rows:
        print("  nothing was measured")
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    values = [[row.get(key, "-") for key in keys] for row in rows]
    cells = [keys, *([f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)), flush=True)


def print_fields(title: str, fields: Mapping[str, Any]) -> None:
    """Prints the fields that are one number or text, a line for each."""
    flat = {name: value for name, value in fields.items() if not isinstance(value, (dict, list, tuple))}
    print_table(title, [{"field": name, "value": value} for name, value in flat.items()])


def write_json(path: pathlib.Path | None, results: Mapping[str, Any]) -> None:
    """Writes the results and the environment, all or nothing. Does nothing when path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({**results, **environment()}, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)


# Ids as in recommendation logs, few hot and most rare. They are a pure function of the seed.

_ID_BITS = 40  # fits every key encoding, and the low bits still look random


class Batch(NamedTuple):
    ids: np.ndarray  # <int64>[F, B, L]
    labels: np.ndarray  # <float32>[B]
    order: np.ndarray  # <int64>[F, B, L], places of the ids in the order of frequency, below Batches.vocabularies


def id_of(order: np.ndarray) -> np.ndarray:
    """Returns <int64>[shape] ids in [0, 2^40) by their places in the order of frequency. It is one-to-one."""
    scattered = np.asarray(order).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (scattered >> np.uint64(64 - _ID_BITS)).astype(np.int64)


class ZipfIds:
    """Draws ids of one feature. The k-th most frequent of `vocabulary` ids has a probability ~ k^-alpha."""

    def __init__(self, vocabulary: int, alpha: float):
        weights = np.arange(1, vocabulary + 1, dtype=np.float64) ** -alpha
        self._cumulative = np.cumsum(weights) / np.sum(weights)

    def order(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Returns <int64>[shape], places of drawn ids in the order of frequency."""
        return np.searchsorted(self._cumulative, random.random(shape))

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Returns <int64>[shape] ids in [0, 2^40)."""
        return id_of(self.order(random, shape))


class Batches:
    """Batches of a click model. The vocabularies of its features have from 10^3 to 10^6 ids."""

    def __init__(self, *, features: int, batch_size: int, ids_per_feature: int, alpha: float):
        self._shape = (batch_size, ids_per_feature)
        self.vocabularies = [int(v) for v in np.geomspace(1e3, 1e6, features)]
        self._features = [ZipfIds(vocabulary, alpha) for vocabulary in self.vocabularies]

    def batch(self, step: int, rank: int) -> Batch:
        """Returns the batch of one step on one rank. Labels depend on the ids, so that a model can learn."""
        random = np.random.default_rng((step, rank))
        order = np.stack([feature.order(random, self._shape) for feature in self._features])
        ids = id_of(order)
        votes = np.where((ids >> 7) & 1, 1.0, -1.0).mean(axis=(0, 2))
        return Batch(ids, (votes > 0).astype(np.float32), order)


def segment_ids(seed: int, *, n_ids: int, zipf_alpha: float, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids <int64>[n_ids], out of 10^6, and the splits <int64>[segments + 1] of equally long segments."""
    random = np.random.default_rng(seed)
    ids = ZipfIds(10**6, zipf_alpha).draw(random, (n_ids,))
    return ids, np.linspace(0, n_ids, segments + 1).astype(np.int64)


def repeated(batches: Sequence[Any], change: Callable[[Any], Any] | None = None) -> Any:
    """Returns a tf.data.Dataset that repeats the batches for ever, after `change` of their dataset."""
    from tf_fusedrec import tf

    whole = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        whole = whole.concatenate(tf.data.Dataset.from_tensors(batch))
    options = tf.data.Options()
    # An iterator with a tuner ends only when the tuner next wakes, up to a minute later.
    options.autotune.enabled = False
    return (change(whole) if change else whole).cache().repeat().with_options(options)
