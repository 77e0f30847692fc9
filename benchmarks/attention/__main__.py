"""Question: how fast is jagged attention beside padded attention and beside a plain matrix product?

    python -m benchmarks.attention [--quick] [--json FILE]

Attention is causal, with 4 heads of 64 columns. The lengths are long-tailed, with mean 600 and maximum 3,000. The peers
(padded.py) multiply batches of padded rows. One peer pads to the longest row, the other to the longest row of a length
bucket (64 to 3,000 by factors of 2). Each runs in TensorFlow's ops and under XLA. All variants take turns.

A ratio is the time of the faster of a peer's two forms over our time. gemm_fraction is our rate of useful FLOPs over
the rate of a tf.matmul of 1024^3 in the same run. Useful FLOPs are causal, without padding. They include the scores
that the backward pass computes again, as in published figures. memory_ratio is our peak memory over the padded one, for
both passes without bias on 4 rows. cost_by_length has picoseconds per useful FLOP of both passes, by length of the
rows. block_fused_ratio compares two HSTU blocks, both passes: the time with gate and norm in TensorFlow's ops over the
time with both in the attention's op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.attention import batch as batch_module
from benchmarks.attention.batch import DIM, HEADS, Batch, long_tailed
from benchmarks.harness import harness, processes
from tf_fusedrec import keras, layers, tf

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GEMM = 1024
GEMM_CALLS = 8  # in a turn


def _gemm() -> Callable[[], Any]:
    matrix = tf.random.stateless_normal([GEMM, GEMM], [1, 2])
    product = tf.function(lambda x: tf.matmul(x, x))
    return lambda: [product(matrix) for _ in range(GEMM_CALLS)][-1].numpy()


def _check(batch: Batch, ours: Mapping[str, Callable[[], Any]], peer: Any, groups: list[list[int]], name: str) -> None:
    """Compares output and all gradients of the op with a peer's."""
    out, gradients = ours["fwd_bwd"]()
    outs, tokens, weights = peer.both()
    for what, got, wanted in zip(
        ("out", "d_query", "d_key", "d_value"),
        [out, *gradients[:3]],
        [outs, *([found[n] for found in tokens] for n in range(3))],
    ):
        jagged = np.zeros(got.shape, np.float32)
        for rows, dense in zip(groups, wanted):
            for row, its in zip(rows, dense.numpy()):
                begin, end = batch.splits[row : row + 2]
                jagged[begin:end] = its[:, : end - begin].transpose(1, 0, 2)
        harness.check_close(f"{what} against {name}", got, jagged, relative=1e-4)
    for what, got, wanted in zip(("d_position", "d_time"), gradients[3:], weights):
        harness.check_close(f"{what} against {name}", got, wanted, relative=1e-4)


def versus_padded(rows: int, repeats: int) -> dict[str, Any]:
    """Times all variants on one batch, with and without bias."""
    variants: dict[str, Callable[[], Any]] = {"gemm": _gemm()}
    variants["gemm"]()
    batches = {"": Batch(long_tailed(rows), bias=False), "_bias": Batch(long_tailed(rows), bias=True)}
    for suffix, batch in batches.items():
        ours = batch.ours()
        variants.update({f"ours_{passes}{suffix}": call for passes, call in ours.items()})
        for kind, bucketed in (("padded", False), *([("bucketed", True)] if not suffix else [])):
            for compiler, xla in (("tf", False), ("xla", True)):
                peer, groups = batch.peer(xla, bucketed)
                _check(batch, ours, peer, groups, f"{kind}_{compiler}{suffix}")
                if kind == "padded" and not suffix:
                    variants[f"{kind}_{compiler}_fwd"] = peer.forward
                variants[f"{kind}_{compiler}_fwd_bwd{suffix}"] = peer.both
    times = harness.measure(variants, warmup=0, repeats=repeats)  # the checks have called them all
    seconds = {name: timing.median_s for name, timing in times.items()}

    def ratio(kind: str, passes: str) -> float:
        return min(seconds[f"{kind}_tf_{passes}"], seconds[f"{kind}_xla_{passes}"]) / seconds[f"ours_{passes}"]

    gemm_rate = GEMM_CALLS * 2 * GEMM**3 / seconds["gemm"]
    fractions = {
        f"gemm_fraction{suffix}{name}": batch.flops(passes) / seconds[f"ours_{passes}{suffix}"] / gemm_rate
        for suffix, batch in batches.items()
        for name, passes in (("", "fwd_bwd"), ("_fwd", "fwd"))
    }
    return {
        "rows": rows, "tokens": int(batches[""].splits[-1]), "heads": HEADS, "dim": DIM,
        "ratio_fwd": ratio("padded", "fwd"), "ratio_fwd_bwd": ratio("padded", "fwd_bwd"),
        "ratio_fwd_bwd_bias": ratio("padded", "fwd_bwd_bias"), "ratio_vs_bucketed": ratio("bucketed", "fwd_bwd"),
        **fractions, "gemm_gflops": gemm_rate / 1e9,
        **{f"ms_{name}": 1e3 * value for name, value in seconds.items() if name != "gemm"},
    }  # fmt: skip


def cost_by_length(tokens: int, repeats: int) -> dict[str, Any]:
    """Returns picoseconds per useful FLOP of both passes, by length."""
    batches = {n: Batch(np.full(max(1, tokens // n), n), bias=False) for n in LENGTHS}
    times = harness.measure({str(n): b.ours()["fwd_bwd"] for n, b in batches.items()}, warmup=2, repeats=repeats)
    cost = {str(n): 1e12 * times[str(n)].median_s / batch.flops("fwd_bwd") for n, batch in batches.items()}
    return {"cost_by_length": cost, "cost_spread": max(cost.values()) / min(cost.values())}


def _passes(layer: layers.HSTU, x: tf.RaggedTensor, grads: tf.Tensor) -> Callable[[], Any]:
    def both():
        with tf.GradientTape() as tape:
            tape.watch(x.values)
            out = layer(x).values
        return out, *tape.gradient(out, [x.values, *layer.trainable_variables], grads)

    return tf.function(both)


def block(rows: int, repeats: int) -> dict[str, float]:
    """Returns the times of the block of the research form, with HEADS heads of DIM columns, and their ratio."""
    lengths, random = long_tailed(rows), np.random.default_rng(2)
    tokens, grads = (random.normal(size=[lengths.sum(), HEADS * DIM]).astype(np.float32) for _ in range(2))
    x = tf.RaggedTensor.from_row_lengths(tokens, lengths)
    calls = {}
    for name in ("fused", "outside"):
        keras.utils.set_random_seed(1)
        heads, dim, longest = HEADS, DIM, batch_module.LONGEST
        layer = layers.HSTU(heads, dim, dim, max_sequence_length=longest, position_bias=False, time_encoding="none")
        layer.build(x.shape)
        if name == "outside":
            layer.kernels = layer.kernels._replace(gates=False)
        calls[name] = _passes(layer, x, tf.constant(grads))
    for number, (ours, theirs) in enumerate(zip(calls["fused"](), calls["outside"]())):
        harness.check_close(f"result {number} of the block", ours, theirs.numpy(), relative=1e-4)
    times = {name: timing.median_s for name, timing in harness.measure(calls, warmup=1, repeats=repeats).items()}
    return {
        "block_fused_ratio": times["outside"] / times["fused"],
        **{f"ms_block_{name}": 1e3 * seconds for name, seconds in times.items()},
    }


MEMORY_ROWS = 4  # the padded peer holds all of them in memory at once


def peak_bytes(variant: str) -> float:
    """Returns the bytes that both passes of `variant` ("ours" or "padded") add to the high-water mark of a process."""
    batch = Batch(long_tailed(MEMORY_ROWS), bias=False)
    if variant == "ours":
        call = batch.ours()["fwd_bwd"]
    else:
        call = batch.peer(xla=False, most_pairs=MEMORY_ROWS * batch_module.LONGEST**2)[0].both
    before = harness.kilobytes("VmRSS")
    call()
    return 1024.0 * (harness.kilobytes("VmHWM") - before)


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    ours, of_padded = (processes.ask(peak_bytes, variant=name) for name in ("ours", "padded"))
    results = {
        "megabytes_ours": ours / 1e6, "megabytes_padded": of_padded / 1e6, "memory_ratio": ours / of_padded,
        **versus_padded(*((8, 3) if arguments.quick else (16, 9))),
        **block(*((8, 5) if arguments.quick else (16, 15))),
        **cost_by_length(16_384, 7 if arguments.quick else 25),
    }  # fmt: skip
    harness.print_fields("attention", results)
    harness.print_fields("picoseconds per useful FLOP, by length", results["cost_by_length"])
    harness.write_json(arguments.json, {"benchmark": "attention", **results})


if __name__ == "__main__":
    processes.program(main)
