"""Question: how fast are the gather of rows and its deterministic gradient on a GPU, beside PyTorch's and CuPy's ops?

    python -m benchmarks.gpu_recovery [--quick] [--json FILE]

The peers gather with embedding and take. They sum with index_add_ and scatter_add, which add in no fixed order, into
rows that they set to zero first, as ours. The work is the rows read and written, the indices read, and an addition per
number of a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu_recovery.peers import LIBRARIES, peer_calls
from benchmarks.harness import gpu_device
from benchmarks.harness.gpu_peers import Call, Libraries
from benchmarks.harness.roofline import Rates, Work, beside
from tests.cuda.checks.recovery import recovered, summed
from tests.oracles.recovery import recover_oracle

# dynamicemb on an H100, D 128, float32, 1.05 M indices of 350 K rows: gather and reduce_grads, us.
PUBLISHED_US = {("recover", 128): {"dynamicemb H100": 295.0}, ("recover_grad", 128): {"dynamicemb H100": 352.0}}


def our_calls(kernels: Any, rows: np.ndarray, index: np.ndarray, gather: Work, scatter: Work) -> dict[str, Call]:
    memory, (num_rows, dim), n = kernels.memory, rows.shape, len(index)
    device_rows, device_index, grads = memory.put(rows), memory.put(index), memory.put(rows[index])
    out, sums = memory.empty([n, dim], np.float32), memory.empty([num_rows, dim], np.float32)
    scratch = kernels.scratch("recover_grad", n, dim)
    return {
        "recover": Call(
            lambda: kernels.run("recover", device_rows, num_rows, 4 * dim, device_index, n, out, n), gather
        ),
        "recover_grad": Call(
            lambda: kernels.run(
                "recover_grad", 0, grads, dim, device_index, n, None, None, 0, scratch, sums, num_rows, num_rows
            ),
            scatter,
        ),
    }


def measure(kernels: Any, n: int, num_rows: int, dim: int, rates: Rates, libraries: Libraries) -> list[dict]:
    random = np.random.default_rng(0)
    index = np.minimum(random.zipf(1.2, n) - 1, num_rows - 1).astype(np.int32)
    rows = random.integers(-8, 9, [num_rows, dim]).astype(np.float32)
    np.testing.assert_array_equal(recovered(kernels, rows, index[:1000], 1000), recover_oracle(rows, index[:1000]))
    wanted = np.zeros([num_rows, dim])
    np.add.at(wanted, index, rows[index])  # integers, whose sums are exact below 2^24
    np.testing.assert_allclose(summed(kernels, 0, rows[index], index, num_rows, num_rows), wanted, rtol=1e-6)

    gather = Work(bytes=n * (8 * dim + 4))
    scatter = Work(bytes=n * (4 * dim + 4) + 4 * num_rows * dim, flops=float(n * dim))
    calls = our_calls(kernels, rows, index, gather, scatter)
    calls.update(peer_calls(libraries, rows, index, wanted, gather, scatter))
    for call in calls.values():
        call.check()
    times = gpu_device.medians_us({name: call.run for name, call in calls.items()})
    return [
        {
            "name": name, "indices": n, "rows": num_rows, "dim": dim, **beside(us, calls[name].work, rates),
            "published_us": PUBLISHED_US.get((name, dim), {}),
        }
        for name, us in times.items()
    ]  # fmt: skip


def main() -> None:
    arguments = gpu_device.options(__doc__, "recovery")
    kernels, libraries = gpu_device.open_kernels(), Libraries(LIBRARIES)
    rates = gpu_device.rates()
    report = gpu_device.Report(arguments.json, rates, libraries.left_out)
    sizes = [(1 << 16, 20_000, 8)] if arguments.quick else [(1 << 20, 350_000, dim) for dim in (8, 64, 128)]
    for size in sizes:
        report.add(measure(kernels, *size, rates, libraries))


if __name__ == "__main__":
    main()
