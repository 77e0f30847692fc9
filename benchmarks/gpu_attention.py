"""Jagged attention on a GPU, forward and backward, bfloat16, causal, with and without bias, beside a Triton kernel.

    python -m benchmarks.gpu_attention [--quick] [--json FILE]

Operations are counted as is usual for causal attention: 4 S^2 D / 2 per head and sequence forward, 2.5 times that
backward; the floor is the measured rate of a large product of matrices. Lengths are drawn between S / 2 and S. The
Triton kernel (gpu_attention_triton.py) is a straightforward one of our own, forward without bias.
"""

from __future__ import annotations

import numpy as np

from benchmarks import gpu_device
from tests.cuda.checks import jagged_attention as checks

HEADS, TOKENS = 4, 1 << 16
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


def prepare(kernels, dim: int, longest: int, bias: bool):
    """(call, scratch, arrays that it points to, operations forward)."""
    random = np.random.default_rng(longest + dim)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(random.integers(longest // 2, longest + 1)))
    case = checks.random_case(lengths, HEADS, dim, dim, bias=bias)
    memory, tokens = kernels.memory, sum(lengths)
    host = {"row_splits": case["row_splits"].astype(np.int64)}
    device = {name: memory.put(checks.to_bits(2, case[name])) for name in ("query", "key", "value")}
    device["scale"] = memory.put(np.array([case["scale"]], np.float32))
    for name in ("out", "grads", "query_grads", "key_grads", "value_grads"):
        device[name] = memory.put(np.zeros([tokens, HEADS, dim], np.uint16))
    call = checks.Call(
        type=2, batch=len(lengths), tokens=tokens, heads=HEADS, qk_dim=dim, value_dim=dim, num_thresholds=-1,
        alpha=case["alpha"],
    )  # fmt: skip
    if bias:
        host["thresholds"] = case["thresholds"]
        for name in ("asks", "answers"):
            device[name] = memory.put(case[name])
        for name in ("position_weights", "time_weights"):
            device[name] = memory.put(case[name].astype(np.float32))
            device[name.replace("weights", "grads")] = memory.put(np.zeros(len(case[name]), np.float32))
        call.num_thresholds = len(case["thresholds"])
        call.max_length = (len(case["position_weights"]) + 1) // 2
    for name, array in host.items():
        setattr(call, name, array.ctypes.data)
    for name, array in device.items():
        setattr(call, name, memory.pointer(array).value)
    scratch = memory.empty([kernels.count("jagged_attention_scratch_bytes", call)], np.uint8)
    operations = 2.0 * HEADS * dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    return call, scratch, (host, device), operations


def measure(kernels, dim: int, longest: int, bias: bool, rate: float) -> list[dict]:
    call, scratch, arrays, operations = prepare(kernels, dim, longest, bias)
    runs = {
        "forward": (lambda: kernels.run("jagged_attention", call, scratch), operations),
        "backward": (lambda: kernels.run("jagged_attention_grad", call, scratch), 2.5 * operations),
    }
    if not bias:
        from benchmarks import gpu_attention_triton

        host, device = arrays
        triton_forward = gpu_attention_triton.prepare(host["row_splits"], device, HEADS, dim, call.alpha)
        runs["triton forward"] = triton_forward, operations
    results = []
    for name, (run, work) in runs.items():
        us = gpu_device.median_us(run, rounds=20)
        flops = work / (us * 1e-6)
        results.append({
            "name": name, "dim": dim, "longest": longest, "bias": bias, "tokens": call.tokens, "us": us,
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
