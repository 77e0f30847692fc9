"""Question: how fast does a GPU remove duplicates in ten segments, beside torch.unique and cupy.unique?

    python -m benchmarks.gpu_segment_unique [--quick] [--json FILE]

Keys are int64 by zipf(1.05). The peers take the whole array as one segment, and sort it. The work of a pass is 8 bytes
read per key, and 4 bytes of inverse per key and 8 bytes per unique key written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import gpu_device
from benchmarks.harness.gpu_peers import Call, Libraries
from benchmarks.harness.roofline import Rates, Work, beside
from tests.cuda.checks.segment_unique import unique

SEGMENTS = 10
# dynamicemb's segmented_unique of 1.05 M keys, 10 tables, zipf 1.05, on an H100, us; its order is not fixed.
PUBLISHED_US = {1 << 20: {"dynamicemb H100": 65.0}}
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
LIBRARIES = ("torch", "cupy")


def keys_of(n: int) -> np.ndarray:
    """Returns Zipf-distributed keys, spread over all 64 bits."""
    ranks = np.random.default_rng(n).zipf(1.05, n).astype(np.uint64)
    return (ranks * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def check(kernels: Any, keys: np.ndarray, splits: np.ndarray) -> int:
    """Checks that the inverse leads back to the keys and that no key occurs twice. Returns the number of keys."""
    ids, bounds, inverse = unique(kernels, keys, splits)
    np.testing.assert_array_equal(ids[inverse], keys)
    for begin, end, first, last in zip(splits[:-1], splits[1:], bounds[:-1], bounds[1:]):
        assert last - first == len(np.unique(keys[begin:end]))
    return len(ids)


def peer_calls(libraries: Libraries, keys: np.ndarray) -> dict[str, Call]:
    """The calls of the libraries that are there, on all keys as one segment."""
    calls, torch, cupy = {}, libraries.get("torch"), libraries.get("cupy")
    distinct = np.unique(keys)
    work = Work(bytes=12 * len(keys) + 8 * len(distinct))

    def equal(found: np.ndarray, inverse: np.ndarray) -> None:
        np.testing.assert_array_equal(found, distinct)
        np.testing.assert_array_equal(found[inverse], keys)

    if torch is not None:
        tensor = torch.from_numpy(keys).cuda()

        def of_torch() -> Any:
            return torch.unique(tensor, return_inverse=True)

        calls["torch.unique"] = Call(of_torch, work, lambda: equal(*(array.cpu().numpy() for array in of_torch())))
    if cupy is not None:
        array = cupy.asarray(keys)

        def of_cupy() -> Any:
            return cupy.unique(array, return_inverse=True)

        calls["cupy.unique"] = Call(of_cupy, work, lambda: equal(*map(cupy.asnumpy, of_cupy())))
    return calls


def measure(kernels: Any, n: int, rates: Rates, libraries: Libraries) -> list[dict]:
    memory = kernels.memory
    keys, splits = keys_of(n), np.arange(SEGMENTS + 1, dtype=np.int64) * n // SEGMENTS
    num_unique = check(kernels, keys, splits)
    device_keys, scratch = memory.put(keys), kernels.scratch("segment_unique", n, SEGMENTS)
    out = memory.empty([n], np.int64), memory.empty([SEGMENTS + 1], np.int64), memory.empty([n], np.int32)

    def ours() -> None:
        kernels.run("segment_unique", device_keys, splits, n, SEGMENTS, scratch, *out)

    calls = {"segment_unique": Call(ours, Work(bytes=12 * n + 8 * num_unique)), **peer_calls(libraries, keys)}
    for call in calls.values():
        call.check()
    times = gpu_device.medians_us({name: call.run for name, call in calls.items()}, rounds=20)
    return [
        {
            "name": name, "keys": n, "segments": SEGMENTS if name == "segment_unique" else 1,
            **beside(us, calls[name].work, rates), "keys_per_s": 1e6 * n / us,
            "times_ours": us / times["segment_unique"],
            "published_us": PUBLISHED_US.get(n, {}) if name == "segment_unique" else {},
        }
        for name, us in times.items()
    ]  # fmt: skip


def main() -> None:
    arguments = gpu_device.options(__doc__, "segment_unique")
    kernels, libraries = gpu_device.open_kernels(), Libraries(LIBRARIES)
    rates = gpu_device.rates()
    report = gpu_device.Report(arguments.json, rates, libraries.left_out)
    for n in SIZES[:1] if arguments.quick else SIZES:
        report.add(measure(kernels, n, rates, libraries))


if __name__ == "__main__":
    main()
