"""Question: how fast are the channels of FuXi on a GPU beside dense maps in PyTorch?

    python -m benchmarks.gpu_bias_attention [--quick] [--json FILE]

Attention is causal, in bfloat16, forward and backward. One map is by position, the other by buckets of time or by a
function of time. A column of a head and channel takes 2 S^2 / 2 operations forward and twice as many backward. The
bound is the measured rate of a large matrix product. Lengths are drawn between S / 2 and S.

PyTorch makes maps [row, S, S] of padded rows and multiplies them with the values, as published code does, forward only.
`difference` is the largest difference between its result and ours, over its largest number.
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu_attention.lengths import lengths_of_rows
from benchmarks.harness import gpu_device
from tests.cuda.checks import jagged_attention_channels as checks
from tests.cuda.checks.jagged_attention_call import from_bits, prepare

HEADS = 4
POWER = 1  # number of the power function of time


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


def measure(kernels, dim: int, longest: int, function: int, rate: float) -> list[dict]:
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
    operations = 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    results = []
    for name, us in gpu_device.medians_us(calls, rounds=20).items():
        flops = (2.0 if name == "backward" else 1.0) * operations / (us * 1e-6)
        results.append({
            "name": name, "columns": HEADS * dim, "longest": longest, "time": "power" if function else "buckets",
            "tokens": sum(lengths), "us": us, "tflops": flops / 1e12, "fraction_of_matrix_rate": flops / rate,
            "difference": apart,
        })  # fmt: skip
    return results


def main() -> None:
    arguments = gpu_device.options(__doc__, "bias_attention")
    kernels, rate = gpu_device.open_kernels(), gpu_device.matrix_flops()
    checks.check_channels_of_rows_of_all_lengths(kernels)
    dims, lengths = ((32,), (512,)) if arguments.quick else ((32, 128), (512, 2048, 8192))
    cases = [(dim, longest, function) for dim in dims for longest in lengths for function in (0, POWER)]
    gpu_device.write(arguments.json, [line for case in cases for line in measure(kernels, *case, rate)])


if __name__ == "__main__":
    main()
