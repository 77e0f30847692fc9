"""Question: how near does jagged attention on a GPU come to the rate of a matrix product, and to published kernels?

    python -m benchmarks.gpu_attention [--quick] [--json FILE]

Attention is causal, in bfloat16, with and without bias. Operations are counted as usual for causal attention: 4 S^2 D /
2 per head and sequence forward, 2.5 times as many backward. Bytes are the tensors of tokens, each read or written once.
Lengths are drawn between S / 2 and S. The peer is a plain Triton kernel (triton_kernel.py), forward without bias, where
Triton is installed.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from benchmarks.gpu_attention.lengths import lengths_of_rows
from benchmarks.harness import gpu_device
from benchmarks.harness.gpu_peers import Call, Libraries
from benchmarks.harness.roofline import Rates, Work, beside
from tests.cuda.checks import jagged_attention as checks
from tests.cuda.checks.jagged_attention_call import Prepared, assert_near, from_bits, prepare, random_case

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


def triton_call(libraries: Libraries, kernels: Any, prepared: Prepared, dim: int, work: Work) -> dict[str, Call]:
    """The Triton kernel on the arrays of a prepared call, if Triton is there. Its check runs our kernel, too."""
    if libraries.get("triton") is None:
        return {}
    from benchmarks.gpu_attention import triton_kernel

    run = triton_kernel.prepare(prepared.host["row_splits"], prepared.device, HEADS, dim, prepared.call.alpha)

    def check() -> None:
        outs = []
        for one in (lambda: kernels.run(prepared.launcher, prepared.call, prepared.scratch), run):
            one()
            outs.append(from_bits(2, kernels.memory.get(prepared.device["out"])))
        assert_near(2, outs[1], outs[0], "out of Triton beside ours", 2)  # each rounds weights and results by itself

    return {"triton forward": Call(run, work, check)}


def measure(kernels: Any, dim: int, longest: int, bias: bool, rates: Rates, libraries: Libraries) -> list[dict]:
    random = np.random.default_rng(longest + dim)
    lengths = lengths_of_rows(random, longest)
    case = random_case(lengths, HEADS, dim, dim, bias=bias)
    forward = prepare(kernels, "jagged_attention", 2, case)
    backward = prepare(kernels, "jagged_attention", 2, case, random.normal(size=case["value"].shape))
    operations = 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    tensor_bytes = 2 * case["value"].size
    # Forward: query, key, value and out. Backward: these without out, and four gradients.
    work = Work(bytes=4 * tensor_bytes, flops=operations)
    calls = {
        "forward": Call(lambda: kernels.run(forward.launcher, forward.call, forward.scratch), work),
        "backward": Call(
            lambda: kernels.run(backward.launcher, backward.call, backward.scratch),
            Work(bytes=7 * tensor_bytes, flops=2.5 * operations),
        ),
    }
    if not bias:
        calls.update(triton_call(libraries, kernels, forward, dim, work))
    for call in calls.values():
        call.check()
    times = gpu_device.medians_us({name: call.run for name, call in calls.items()}, rounds=20)
    return [
        {
            "name": name, "dim": dim, "longest": longest, "bias": bias, "tokens": sum(lengths),
            **beside(us, calls[name].work, rates), "tflops": calls[name].work.flops / us / 1e6,
            "published_tflops": published(name, dim, longest),
        }
        for name, us in times.items()
    ]  # fmt: skip


def main() -> None:
    arguments = gpu_device.options(__doc__, "attention")
    kernels, libraries = gpu_device.open_kernels(), Libraries(["triton"])
    rates = gpu_device.rates()
    checks.check_rows_of_all_lengths(kernels)
    report = gpu_device.Report(arguments.json, rates, libraries.left_out)
    dims, lengths = ((64,), (512,)) if arguments.quick else ((64, 128), (512, 1024, 2048, 4096, 8192))
    for dim, longest, bias in itertools.product(dims, lengths, (False, True)):
        report.add(measure(kernels, dim, longest, bias, rates, libraries))


if __name__ == "__main__":
    main()
