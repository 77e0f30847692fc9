"""Question: how fast are the channels of FuXi on a GPU beside dense maps in PyTorch?

    python -m benchmarks.gpu_bias_attention [--quick] [--json FILE]

Attention is causal, in bfloat16, forward and backward. One map is by position, the other by buckets of time or by a
function of time. A column of a head and channel takes 2 S^2 / 2 operations forward and twice as many backward. Bytes
are the values, the times and the results, each read or written once. Lengths are drawn between S / 2 and S.

PyTorch makes maps [row, S, S] of padded rows and multiplies them with the values, as published code does, forward only.
`difference` is the largest difference between its result and ours, over its largest number.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.gpu_attention.lengths import lengths_of_rows
from benchmarks.harness import gpu_device
from benchmarks.harness.roofline import Rates, Work, beside
from tests.cuda.checks import jagged_attention_channels as checks
from tests.cuda.checks.jagged_attention_call import from_bits, prepare

HEADS = 4
POWER = 1  # number of the power function of time
# PyTorch rounds both maps and the values to bfloat16, 2^-8 each, and its sums of up to 8192 terms; ours the results.
MOST_APART = 2.0**-5


def dense_forward(case: dict, lengths: list[int]):
    """Returns a function that computes both maps and their products [row, S, H, channels, Dv], padded."""
    import torch

    rows, longest = len(lengths), max(lengths)
    splits = np.concatenate([[0], np.cumsum(lengths)])

    def padded(array: np.ndarray) -> torch.Tensor:
        dense = np.zeros([rows, longest, *array.shape[1:]], array.dtype)
        for b, length in enumerate(lengths):
            dense[b, :length] = array[splits[b] : splits[b + 1]]
        return torch.from_numpy(dense).cuda()

    value = padded(case["value"].reshape(splits[-1], -1).astype(np.float32)).bfloat16()
    asks, answers = padded(case["asks"]), padded(case["answers"])
    position, time = (
        torch.tensor(case[f"{name}_weights"], dtype=torch.float32, device="cuda") for name in ("position", "time")
    )
    thresholds = None if "time_function" in case else torch.from_numpy(case["thresholds"]).cuda()
    places = torch.arange(longest, device="cuda")
    index = len(position) // 2 + places[None, :] - places[:, None]
    causal = (places[:, None] >= places[None, :]).bfloat16()

    def run() -> torch.Tensor:
        difference = asks[:, :, None] - answers[:, None, :]
        if thresholds is None:
            time_map = time[0] * (difference.clamp(min=0).float() + 1.0) ** -time[1]
        else:
            time_map = time[torch.bucketize(difference.abs(), thresholds, right=True)]
        maps = (position[index].bfloat16() * causal, time_map.bfloat16() * causal)
        outs = [torch.matmul(one, value).reshape(rows, longest, HEADS, 1, -1) for one in maps]
        return torch.cat(outs, dim=3)

    return run


def difference(ours: np.ndarray, dense: np.ndarray, lengths: list[int]) -> float:
    dense = np.concatenate([dense[b, :length].reshape(length, HEADS, -1) for b, length in enumerate(lengths)])
    return float(np.max(np.abs(ours - dense)) / np.max(np.abs(dense)))


def measure(kernels: Any, dim: int, longest: int, function: int, rates: Rates) -> list[dict]:
    random = np.random.default_rng(longest + dim)
    lengths = lengths_of_rows(random, longest)
    case = checks.channels(lengths, HEADS, dim, function=function)
    grads = random.normal(size=[sum(lengths), HEADS, 2 * dim])
    forward, backward = (prepare(kernels, "bias_attention", 2, case, of) for of in (None, grads))
    dense = dense_forward(case, lengths)
    calls = {
        "forward": lambda: kernels.run(forward.launcher, forward.call, forward.scratch),
        "backward": lambda: kernels.run(backward.launcher, backward.call, backward.scratch),
        "torch dense forward": dense,
    }
    calls["forward"]()
    apart = difference(from_bits(2, kernels.memory.get(forward.device["out"])), dense().float().cpu().numpy(), lengths)
    assert apart <= MOST_APART, f"the result differs from PyTorch's by {apart:.2e} of its largest number"
    operations = 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    value_bytes, time_bytes = 2 * case["value"].size, 2 * 8 * sum(lengths)
    # Forward: values, and both channels out. Backward: values, both channels' gradients, and gradients of values.
    works = {
        "forward": Work(bytes=3 * value_bytes + time_bytes, flops=operations),
        "backward": Work(bytes=4 * value_bytes + time_bytes, flops=2.0 * operations),
    }
    works["torch dense forward"] = works["forward"]
    return [
        {
            "name": name, "columns": HEADS * dim, "longest": longest, "time": "power" if function else "buckets",
            "tokens": sum(lengths), **beside(us, works[name], rates), "tflops": works[name].flops / us / 1e6,
            "difference": apart,
        }
        for name, us in gpu_device.medians_us(calls, rounds=20).items()
    ]  # fmt: skip


def main() -> None:
    arguments = gpu_device.options(__doc__, "bias_attention")
    kernels, rates = gpu_device.open_kernels(), gpu_device.rates()
    checks.check_channels_of_rows_of_all_lengths(kernels)
    report = gpu_device.Report(arguments.json, rates, {})
    dims, lengths = ((32,), (512,)) if arguments.quick else ((32, 128), (512, 2048, 8192))
    for dim, longest, function in itertools.product(dims, lengths, (0, POWER)):
        report.add(measure(kernels, dim, longest, function, rates))


if __name__ == "__main__":
    main()
