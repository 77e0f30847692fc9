"""Question: how fast are the gather of rows and its deterministic gradient on a GPU, beside PyTorch's ops?

    python -m benchmarks.gpu_recovery [--quick] [--json FILE]

The peers are index_select and index_add_, which adds in no fixed order. The bound is the copy bandwidth, for the rows
read and written and the indices read.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import gpu_device
from tests.cuda.checks.recovery import recovered, summed
from tests.oracles.recovery import recover_oracle

# dynamicemb on an H100, D 128, float32, 1.05 M indices of 350 K rows: gather and reduce_grads, us.
PUBLISHED_US = {("recover", 128): {"dynamicemb H100": 295.0}, ("recover_grad", 128): {"dynamicemb H100": 352.0}}


def measure(kernels, n: int, num_rows: int, dim: int, bandwidth: float) -> list[dict]:
    import torch

    memory, random = kernels.memory, np.random.default_rng(0)
    index = np.minimum(random.zipf(1.2, n) - 1, num_rows - 1).astype(np.int32)
    rows = random.integers(-8, 9, [num_rows, dim]).astype(np.float32)
    np.testing.assert_array_equal(recovered(kernels, rows, index[:1000], 1000), recover_oracle(rows, index[:1000]))
    wanted = np.zeros([num_rows, dim])
    np.add.at(wanted, index, rows[index])
    np.testing.assert_allclose(summed(kernels, 0, rows[index], index, num_rows, num_rows), wanted, rtol=1e-6)

    device_rows, device_index = memory.put(rows), memory.put(index)
    out, summed_rows = memory.empty([n, dim], np.float32), memory.empty([num_rows, dim], np.float32)
    scratch = kernels.scratch("recover_grad", n, dim)
    tensor, long_index = torch.from_numpy(rows).cuda(), torch.from_numpy(index.astype(np.int64)).cuda()
    gathered, zeros = tensor[long_index], torch.zeros_like(tensor)
    calls = {
        "recover": lambda: kernels.run("recover", device_rows, num_rows, 4 * dim, device_index, n, out, n),
        "recover_grad": lambda: kernels.run(
            "recover_grad", 0, out, dim, device_index, n, None, None, 0, scratch, summed_rows, num_rows, num_rows
        ),
        "torch_index_select": lambda: torch.index_select(tensor, 0, long_index),
        "torch_index_add": lambda: zeros.index_add_(0, long_index, gathered),
    }
    gather, scatter = n * (8 * dim + 4), n * (4 * dim + 4) + 4 * num_rows * dim
    moved = {"recover": gather, "torch_index_select": gather, "recover_grad": scatter, "torch_index_add": scatter}
    results = []
    for name, call in calls.items():
        us = gpu_device.median_us(call)
        results.append({
            "name": name, "indices": n, "rows": num_rows, "dim": dim, "us": us, "bytes": moved[name],
            "fraction_of_copy_bandwidth": moved[name] / (us * 1e-6) / bandwidth,
            "published_us": PUBLISHED_US.get((name, dim), {}),
        })  # fmt: skip
    return results


def main() -> None:
    arguments = gpu_device.options(__doc__, "recovery")
    kernels, bandwidth = gpu_device.open_kernels(), gpu_device.copy_bytes_per_s()
    sizes = [(1 << 16, 20_000, 8)] if arguments.quick else [(1 << 20, 350_000, dim) for dim in (8, 64, 128)]
    gpu_device.write(arguments.json, [line for size in sizes for line in measure(kernels, *size, bandwidth)])


if __name__ == "__main__":
    main()
