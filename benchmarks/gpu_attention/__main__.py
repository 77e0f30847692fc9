"""Question: how near does jagged attention on a GPU come to the rate of a matrix product, and to published kernels?

    python -m benchmarks.gpu_attention [--quick] [--json FILE]

Attention is causal, in bfloat16, with and without bias. Operations are counted as usual for causal attention: 4 S^2 D /
2 per head and sequence forward, 2.5 times as many backward. The bound is the measured rate of a large matrix product.
Lengths are drawn between S / 2 and S. The peer is a plain Triton kernel (triton_kernel.py), forward without bias.
"""

from __future__ import annotations

import numpy as np

from benchmarks.gpu_attention.lengths import lengths_of_rows
from benchmarks.harness import gpu_device
from tests.cuda.checks import jagged_attention as checks
from tests.cuda.checks.jagged_attention_call import prepare, random_case

HEADS = 4
# TFLOP/s on an H100 SXM, bfloat16, causal, no bias, by (pass, dim, longest): HSTU kernels of recsys-examples (wgmma),
# and FlashAttention-2 (mma.sync, as ours), which is attention with softmax.
PUBLISHED: dict[tuple[str, int], dict[int, tuple]] = {
    ("forward", 64): {512: (169, 180), 1024: (253, 229), 2048: (368, 262), 4096: (426, 284)},
    ("backward", 64): {512: (166, None), 1024: (257, None), 2048: (329, None), 4096: (379, None)},
    ("forward", 128): {512: (261, 191), 1024: (391, 260), 2048: (459, 298), 4096: (505, 319)},
    ("backward", 128): {512: (197, None), 1024: (313, None), 2048: (383, None), 4096: (439, None)},
}


def published(name: str, dim: int, longest: int) -> dict[str, float]:
    figures = PUBLISHED.get((name, dim), {}).get(longest, (None, None))
    return {who: x for who, x in zip(("recsys-examples HSTU H100", "FlashAttention-2 H100"), figures) if x is not None}


def measure(kernels, dim: int, longest: int, bias: bool, rate: float) -> list[dict]:
    random = np.random.default_rng(longest + dim)
    lengths = lengths_of_rows(random, longest)
    case = random_case(lengths, HEADS, dim, dim, bias=bias)
    forward = prepare(kernels, "jagged_attention", 2, case)
    backward = prepare(kernels, "jagged_attention", 2, case, random.normal(size=case["value"].shape))
    operations = 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    runs = {
        "forward": (lambda: kernels.run(forward.launcher, forward.call, forward.scratch), operations),
        "backward": (lambda: kernels.run(backward.launcher, backward.call, backward.scratch), 2.5 * operations),
    }
    if not bias:
        from benchmarks.gpu_attention import triton_kernel

        triton_forward = triton_kernel.prepare(
            forward.host["row_splits"], forward.device, HEADS, dim, forward.call.alpha
        )
        runs["triton forward"] = triton_forward, operations
    results = []
    for name, (run, work) in runs.items():
        us = gpu_device.median_us(run, rounds=20)
        flops = work / (us * 1e-6)
        results.append({
            "name": name, "dim": dim, "longest": longest, "bias": bias, "tokens": sum(lengths), "us": us,
            "tflops": flops / 1e12, "fraction_of_matrix_rate": flops / rate,
            "published_tflops": published(name, dim, longest),
        })  # fmt: skip
    return results


def main() -> None:
    arguments = gpu_device.options(__doc__, "attention")
    kernels, rate = gpu_device.open_kernels(), gpu_device.matrix_flops()
    checks.check_rows_of_all_lengths(kernels)
    dims, lengths = ((64,), (512,)) if arguments.quick else ((64, 128), (512, 1024, 2048, 4096, 8192))
    cases = [(dim, longest, bias) for dim in dims for longest in lengths for bias in (False, True)]
    gpu_device.write(arguments.json, [line for case in cases for line in measure(kernels, *case, rate)])


if __name__ == "__main__":
    main()
