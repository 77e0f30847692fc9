"""Question: how fast does a GPU remove duplicates in ten segments, beside torch.unique of the whole array?

    python -m benchmarks.gpu_segment_unique [--quick] [--json FILE]

Keys are int64 by zipf(1.05). The bound is the copy bandwidth. A pass reads 8 bytes per key, and writes 4 bytes of
inverse per key and 8 bytes per unique key.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import gpu_device
from tests.cuda.checks.segment_unique import unique

SEGMENTS = 10
# dynamicemb's segmented_unique of 1.05 M keys, 10 tables, zipf 1.05, on an H100, us; its order is not fixed.
PUBLISHED_US = {1 << 20: {"dynamicemb H100": 65.0}}
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


def keys_of(n: int) -> np.ndarray:
    """Returns Zipf-distributed keys, spread over all 64 bits."""
    ranks = np.random.default_rng(n).zipf(1.05, n).astype(np.uint64)
    return (ranks * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def check(kernels, keys, splits):
    """Checks that the inverse leads back to the keys and that no key occurs twice. Returns the number of keys."""
    ids, bounds, inverse = unique(kernels, keys, splits)
    np.testing.assert_array_equal(ids[inverse], keys)
    for begin, end, first, last in zip(splits[:-1], splits[1:], bounds[:-1], bounds[1:]):
        assert last - first == len(np.unique(keys[begin:end]))
    return len(ids)


def measure(kernels, n: int, bandwidth: float) -> dict:
    import torch

    memory = kernels.memory
    keys, splits = keys_of(n), np.arange(SEGMENTS + 1, dtype=np.int64) * n // SEGMENTS
    num_unique = check(kernels, keys, splits)
    device_keys, scratch = memory.put(keys), kernels.scratch("segment_unique", n, SEGMENTS)
    out = memory.empty([n], np.int64), memory.empty([SEGMENTS + 1], np.int64), memory.empty([n], np.int32)
    call = lambda: kernels.run("segment_unique", device_keys, splits, n, SEGMENTS, scratch, *out)  # noqa: E731
    ours = gpu_device.median_us(call)
    tensor = torch.from_numpy(keys).cuda()
    theirs = gpu_device.median_us(lambda: torch.unique(tensor, return_inverse=True), rounds=10)
    moved = 12 * n + 8 * num_unique
    return {
        "keys": n, "segments": SEGMENTS, "unique": num_unique, "us": ours, "keys_per_s": n / ours * 1e6,
        "torch_unique_us": theirs, "ratio_to_torch_unique": theirs / ours, "bytes": moved,
        "fraction_of_copy_bandwidth": moved / (ours * 1e-6) / bandwidth, "published_us": PUBLISHED_US.get(n, {}),
    }  # fmt: skip


def main() -> None:
    arguments = gpu_device.options(__doc__, "segment_unique")
    kernels, bandwidth = gpu_device.open_kernels(), gpu_device.copy_bytes_per_s()
    sizes = SIZES[:1] if arguments.quick else SIZES
    gpu_device.write(arguments.json, [measure(kernels, n, bandwidth) for n in sizes])


if __name__ == "__main__":
    main()
