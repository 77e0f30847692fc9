"""Question: how fast is jagged attention beside padded attention and beside a plain matrix product?

    python -m benchmarks.attention [--quick] [--json FILE]

Attention is causal, with 4 heads of 64 columns. The lengths are long-tailed, with mean 600 and maximum 3,000. The peers
multiply batches of padded rows in plain TensorFlow, as fast as we can write it. One peer pads to the longest row, the
other to the longest row of a length bucket (64 to 3,000 by factors of 2). Each runs in TensorFlow's ops and under XLA.
The peers get padded tokens [B, H, n, d] and the buckets of all pairs, which is not timed. Their backward pass computes
the scores again, as ours does, with the fewest passes over [B, H, n, n] that TensorFlow's ops allow. A peer computes a
few rows at a time, which costs no time and limits its memory. All variants take turns.

A ratio is the time of the faster of a peer's two forms over our time. gemm_fraction is our rate of useful FLOPs over
the rate of a tf.matmul of 1024^3 in the same run. Useful FLOPs are causal, without padding. They include the scores
that the backward pass computes again, as in published figures. memory_ratio is our peak memory over the padded one, for
both passes without bias on 4 rows. cost_by_length has picoseconds per useful FLOP of both passes, by length of the
rows. block_fused_ratio compares two HSTU blocks, both passes: the time with gate and norm in TensorFlow's ops over the
time with both in the attention's op.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import harness, processes
from tf_fusedrec import keras, layers, ops, tf
from tf_fusedrec.layers.relative_bias import bucket_thresholds


class Weights(NamedTuple):
    position: tf.Tensor  # <float32>[2N-1]
    time: tf.Tensor  # <float32>[G+1]


class Rows(NamedTuple):
    """Padded rows: queries, keys, values and the gradient of the output <float32>[B, H, n, d]; buckets [B, n, n]."""

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    grads: tf.Tensor
    buckets: tf.Tensor


def _causal(length: tf.Tensor) -> tf.Tensor:
    return tf.linalg.band_part(tf.ones([length, length]), -1, 0)


def _scores(rows: Rows, weights: Weights | None) -> tf.Tensor:
    scores = tf.matmul(rows.query, rows.key, transpose_b=True)
    if weights is None:
        return scores
    of_position = tf.gather(weights.position, _distance(weights, tf.shape(scores)[-1]))
    return scores + (of_position + tf.gather(weights.time, rows.buckets))[:, None]


def _distance(weights: Weights, length: tf.Tensor) -> tf.Tensor:
    places = tf.range(length)
    return tf.shape(weights.position)[0] // 2 + places[None, :] - places[:, None]


def forward(rows: Rows, weights: Weights | None, scale: float) -> tf.Tensor:
    """Returns the output [B, H, n, d]."""
    scores = _scores(rows, weights)
    return tf.matmul(tf.nn.silu(scores) * _causal(tf.shape(scores)[-1]), rows.value) * scale


def backward(rows: Rows, weights: Weights | None, scale: float) -> list[tf.Tensor]:
    """Returns the gradients of query, key, value and the weights of the bias."""
    scores = _scores(rows, weights)
    length = tf.shape(scores)[-1]
    grads = rows.grads * scale
    sigmoid = tf.sigmoid(scores)
    visible_sigmoid = sigmoid * _causal(length)
    seen = scores * visible_sigmoid
    d_scores = tf.matmul(grads, rows.value, transpose_b=True) * (visible_sigmoid + seen * (1.0 - sigmoid))
    found = [
        tf.matmul(d_scores, rows.key),
        tf.matmul(d_scores, rows.query, transpose_a=True),
        tf.matmul(seen, grads, transpose_a=True),
    ]
    if weights is None:
        return found
    d_bias = tf.reduce_sum(d_scores, axis=1)
    by_distance = tf.reduce_sum(d_bias, axis=0)
    d_position = tf.math.unsorted_segment_sum(by_distance, _distance(weights, length), tf.shape(weights.position)[0])
    d_time = tf.math.unsorted_segment_sum(d_bias, rows.buckets, tf.shape(weights.time)[0])
    return [*found, d_position, d_time]


class Peer:
    """Runs padded batches one after another, and sums the gradients of the weights."""

    def __init__(self, batches: Sequence[Rows], weights: Weights | None, scale: float, xla: bool):
        def compiled(function: Callable[..., Any], rows: Rows) -> Callable[[], Any]:
            return tf.function(lambda: function(rows, weights, scale), jit_compile=xla)

        # Each batch has a graph of its own, in which TensorFlow knows all shapes.
        self._forward = [compiled(forward, rows) for rows in batches]
        self._backward = [compiled(backward, rows) for rows in batches]

    def forward(self) -> list[tf.Tensor]:
        return [call() for call in self._forward]

    def both(self) -> tuple[list[tf.Tensor], list[list[tf.Tensor]], list[tf.Tensor]]:
        """Returns outputs, gradients of query, key and value, and the summed gradients of the weights."""
        outs, tokens, weights = [], [], []
        for forward_call, backward_call in zip(self._forward, self._backward):
            outs.append(forward_call())
            found = backward_call()
            tokens.append(found[:3])
            weights.append(found[3:])
        return outs, tokens, [tf.add_n(parts) for parts in zip(*weights)]


def padded(arrays: Sequence[np.ndarray], splits: np.ndarray, rows: Sequence[int], length: int) -> list[np.ndarray]:
    """Returns arrays [len(rows), H, length, d] of the given rows, from arrays [T, H, d]."""
    found = []
    for array in arrays:
        out = np.zeros((len(rows), array.shape[1], length, array.shape[2]), np.float32)
        for place, row in enumerate(rows):
            tokens = array[splits[row] : splits[row + 1]]
            out[place, :, : len(tokens)] = tokens.transpose(1, 0, 2)
        found.append(out)
    return found


def groups_of(lengths: np.ndarray, edges: Sequence[int], most: int) -> list[list[int]]:
    """Returns groups of rows. A group's lengths lie between two edges, and its padded pairs are at most `most`."""
    groups = []
    for low, high in zip([0, *edges[:-1]], edges):
        inside = [row for row in np.argsort(lengths, kind="stable") if low < lengths[row] <= high]
        size = max(1, most // max([1, *(int(lengths[row]) ** 2 for row in inside)]))
        groups += [inside[begin : begin + size] for begin in range(0, len(inside), size)]
    return groups


HEADS, DIM = 4, 64
LONGEST, MEAN = 3000, 600
BUCKETS = 128
EDGES = (64, 128, 256, 512, 1024, 2048, LONGEST)  # longest rows of the buckets of the bucketed peer
MOST_PAIRS = 4 * LONGEST**2  # pairs per head that a padded peer computes at a time


def long_tailed(rows: int) -> np.ndarray:
    """Returns lengths with maximum LONGEST and mean MEAN, at the quantiles of a lognormal law (MTGRBoost, 6.1)."""
    normal = statistics.NormalDist()
    tail = np.array([normal.inv_cdf((row + 0.5) / rows) for row in range(rows)])
    low, high = 0.0, 5.0
    for _ in range(60):  # a longer tail makes the others shorter
        sigma = (low + high) / 2
        lengths = LONGEST * np.exp(sigma * (tail - tail[-1]))
        low, high = (sigma, high) if lengths.mean() > MEAN else (low, sigma)
    return np.random.default_rng(0).permutation(np.maximum(np.round(lengths), 1).astype(np.int64))


class Batch:
    """Tokens of some rows. `bias` adds the position and time bias of the research HSTU."""

    def __init__(self, lengths: np.ndarray, bias: bool):
        random = np.random.default_rng(1)
        self.lengths, self.longest = lengths, int(lengths.max())
        self.splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = int(self.splits[-1])
        self.arrays = [random.normal(size=(tokens, HEADS, DIM)).astype(np.float32) * DIM**-0.25 for _ in range(4)]
        # Sessions: half of the events follow within a minute, the others hours later.
        gaps = np.where(random.random(tokens) < 0.5, random.exponential(60, tokens), random.exponential(40_000, tokens))
        stamps = 1_500_000_000 + np.cumsum(gaps).astype(np.int64)
        self.times = ops.sequence_times(tf.RaggedTensor.from_row_splits(stamps, self.splits))
        self.thresholds = bucket_thresholds(BUCKETS)
        self.scale = 1.0 / self.longest
        self.weights = None
        if bias:
            drawn = [random.normal(size=n).astype(np.float32) * 0.1 for n in (2 * self.longest - 1, BUCKETS + 1)]
            self.weights = Weights(*map(tf.constant, drawn))

    def pairs(self) -> float:
        return HEADS * float(np.sum(self.lengths * (self.lengths + 1) // 2))

    def flops(self, passes: str) -> float:
        """Returns the useful FLOPs. A pair has two products forward, and five backward with the scores again."""
        return self.pairs() * 2 * DIM * {"fwd": 2, "fwd_bwd": 7}[passes]

    def ours(self) -> dict[str, Callable[[], Any]]:
        """Returns calls of the op by name: "fwd", "fwd_bwd"."""
        query, key, value, grads = map(tf.constant, self.arrays)
        splits, weights = tf.constant(self.splits), list(self.weights or ())

        def attend(query, key, value, weights):
            bias = None
            if weights:
                table = ops.BucketTable(weights[1], tf.constant(self.thresholds))
                bias = ops.RelativeBias(weights[0], table, self.times)
            return ops.jagged_attention(query, key, value, splits, scale=self.scale, bias=bias)

        def both():
            watched = [query, key, value, *weights]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                out = attend(query, key, value, weights)
            return out, tape.gradient(out, watched, grads)

        return {"fwd": tf.function(lambda: attend(query, key, value, weights)), "fwd_bwd": tf.function(both)}

    def peer(self, xla: bool, bucketed: bool = False, most_pairs: int = MOST_PAIRS) -> tuple[Peer, list[list[int]]]:
        """Returns the padded peer and the rows of each of its batches."""
        groups = groups_of(self.lengths, EDGES if bucketed else (self.longest,), most_pairs)
        return Peer([self._rows(group, bucketed) for group in groups], self.weights, self.scale, xla), groups

    def _rows(self, rows: list[int], bucketed: bool) -> Rows:
        length = int(self.lengths[rows].max()) if bucketed else self.longest
        query, key, value, grads = map(tf.constant, padded(self.arrays, self.splits, rows, length))
        buckets = np.zeros((len(rows), length, length) if self.weights else (0, 0, 0), np.int32)
        for place, row in enumerate(rows if self.weights else ()):
            asks, answers = (times.numpy()[self.splits[row] : self.splits[row + 1]] for times in self.times)
            found = np.searchsorted(self.thresholds, np.abs(asks[:, None] - answers[None, :]), side="right")
            buckets[place, : len(asks), : len(asks)] = found
        return Rows(query, key, value, grads, tf.constant(buckets))


LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
GEMM = 1024
GEMM_CALLS = 8  # in a turn


def _gemm() -> Callable[[], Any]:
    matrix = tf.random.stateless_normal([GEMM, GEMM], [1, 2])
    product = tf.function(lambda x: tf.matmul(x, x))
    return lambda: [product(matrix) for _ in range(GEMM_CALLS)][-1].numpy()


def _check(batch: Batch, ours: Mapping[str, Callable[[], Any]], peer: Any, groups: list[list[int]], name: str) -> None:
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
        heads, dim, longest = HEADS, DIM, LONGEST
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
        call = batch.peer(xla=False, most_pairs=MEMORY_ROWS * LONGEST**2)[0].both
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
