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

from benchmarks.attention.batch import DIM, HEADS, Batch, long_tailed
from benchmarks.attention.block import block
from benchmarks.harness import children, harness
from tf_fusedrec import tf

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GEMM = 1024
GEMM_CALLS = 8  # in a turn
# Sums of up to 3,000 products in float32, in another order.
REASON = "float32 sums of another order"


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
        harness.check_close(f"{what} against {name}", got, jagged, relative=1e-4, reason=REASON)
    for what, got, wanted in zip(("d_position", "d_time"), gradients[3:], weights):
        harness.check_close(f"{what} against {name}", got, wanted, relative=1e-4, reason=REASON)


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
        "rows": rows,
        "tokens": int(batches[""].splits[-1]),
        "heads": HEADS,
        "dim": DIM,
        "ratio_fwd": ratio("padded", "fwd"),
        "ratio_fwd_bwd": ratio("padded", "fwd_bwd"),
        "ratio_fwd_bwd_bias": ratio("padded", "fwd_bwd_bias"),
        "ratio_vs_bucketed": ratio("bucketed", "fwd_bwd"),
        **fractions,
        "gemm_gflops": gemm_rate / 1e9,
        **{f"ms_{name}": 1e3 * value for name, value in seconds.items() if name != "gemm"},
    }


def cost_by_length(tokens: int, repeats: int) -> dict[str, Any]:
    """Returns picoseconds per useful FLOP of both passes, by length."""
    batches = {n: Batch(np.full(max(1, tokens // n), n), bias=False) for n in LENGTHS}
    times = harness.measure({str(n): b.ours()["fwd_bwd"] for n, b in batches.items()}, warmup=2, repeats=repeats)
    cost = {str(n): 1e12 * times[str(n)].median_s / batch.flops("fwd_bwd") for n, batch in batches.items()}
    return {"cost_by_length": cost, "cost_spread": max(cost.values()) / min(cost.values())}


def memory() -> dict[str, float]:
    """Returns the peak memory of both variants."""
    ours, padded = (children.ask("benchmarks.attention.memory", variant=name) for name in ("ours", "padded"))
    return {"megabytes_ours": ours / 1e6, "megabytes_padded": padded / 1e6, "memory_ratio": ours / padded}


def main() -> None:
    """Measures, prints and writes the results."""
    arguments = harness.parse_arguments(__doc__ or "")
    results = {
        **memory(),
        **versus_padded(*((8, 3) if arguments.quick else (16, 9))),
        **block(*((8, 5) if arguments.quick else (16, 15))),
        **cost_by_length(16_384, 7 if arguments.quick else 25),
    }
    flat = {name: value for name, value in results.items() if not isinstance(value, dict)}
    harness.print_table("attention", [{"what": name, "value": value} for name, value in flat.items()])
    costs = [{"length": n, "ps per FLOP": value} for n, value in results["cost_by_length"].items()]
    harness.print_table("cost by length", costs)
    harness.write_json(arguments.json, {"benchmark": "attention", **results})


if __name__ == "__main__":
    harness.run(main)
