"""Outputs and gradients of the attention ops over random cases, as hashes: tests/golden/attention.json.

    python -m tests.golden.attention avx512     # writes the hashes of this machine under the name of its engine

The engines of the instruction sets differ in the last bits (custom_ops/jagged_attention/cpu/jagged_attention.h), so the
file has the hashes of each. test_attention.py demands those of one engine, whichever the processor can run.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.golden import hashes
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

CASES = 60
LENGTHS = (0, 1, 5, 16, 40, 64, 65, 90, 200, 530)
PARAMETERS = {"power": [0.8, 0.4], "exponential": [0.7, -8.0], "stretched": [0.9, -3.0, 0.3]}
THRESHOLDS = np.array([2, 2, 5, 40, 41, 300, 1000, 90_000, 2**33], np.int64)


def _splits(lengths):
    return tf.constant(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def op_of(number: int) -> str:
    return ("jagged_attention", "gated_attention", "bias_attention")[number % 3]


def _lengths(random):
    return random.choice(LENGTHS, random.integers(0, 5))


def tokens_of(number: int) -> int:
    """Returns the tokens of a case."""
    return int(_lengths(np.random.default_rng(number)).sum())


def results(number: int) -> list[tf.Tensor]:
    """Returns output and gradients of the case with this number."""
    random = np.random.default_rng(number)
    op = op_of(number)
    dtype = (tf.float32, tf.float32, tf.bfloat16, tf.float16)[number // 3 % 4]
    lengths = _lengths(random)
    tokens, heads = int(lengths.sum()), int(random.integers(1, 4))
    qk_dim, value_dim = (int(random.choice([1, 3, 8, 16, 33])) for _ in range(2))
    queries = random.integers(0, lengths + 1) if number % 5 == 4 else lengths
    asking = int(queries.sum())

    def normal(*shape, of=None):
        return tf.cast(random.normal(size=shape).astype(np.float32), of or dtype)

    given = {"value": normal(tokens, heads, value_dim)}
    if op != "bias_attention":
        given.update(query=normal(asking, heads, qk_dim), key=normal(tokens, heads, qk_dim))
    masks = {
        "num_targets": random.integers(0, np.minimum(queries, 9) + 1) if random.random() < 0.5 else None,
        "contextual_length": random.integers(0, 5, len(lengths)) if random.random() < 0.3 else 0,
        "attention_window": int(random.choice([0, 0, 3, 70])),
        "min_full_length": int(random.choice([0, 4])),
        "target_group_size": int(random.choice([1, 2, 5])),
        "query_splits": _splits(queries) if number % 5 == 4 else None,
    }
    masks["global_window"] = int(random.choice([0, 6])) if masks["attention_window"] else 0

    kind = random.choice(["none", "buckets", "power", "exponential", "stretched"])
    if op == "bias_attention" or random.random() < 0.4:
        given["position"] = normal(2 * max(lengths, default=1) + 1, of=tf.float32)
    if kind != "none":
        answers = random.integers(0, 2**61 if kind == "buckets" and random.random() < 0.3 else 200_000, tokens)
        ends = np.cumsum(lengths)
        asks = [answers[end - count : end] for end, count in zip(ends, queries)]
        asks = np.concatenate([np.zeros(0, np.int64), *asks]) + random.integers(-50, 5000, asking)
        times = ops.SequenceTimes(tf.constant(asks, tf.int64), tf.constant(answers, tf.int64))
        given["time"] = normal(10, of=tf.float32) if kind == "buckets" else tf.constant(PARAMETERS[kind])
    if op == "gated_attention":
        given["gate"] = normal(asking, heads, value_dim)
        if random.random() < 0.7:
            given.update({name: normal(heads * value_dim, of=tf.float32) for name in ("norm_weight", "norm_bias")})
        form = {"per_head": bool(random.integers(2)), "gate_first": bool(random.integers(2)), "epsilon": 1e-3}
    scale = random.uniform(0.1, 1.0, asking).astype(np.float32) if random.random() < 0.5 else 0.125
    if random.random() < 0.3:
        dropout = {"dropout": 0.3, "dropout_seed": tf.constant(random.integers(-(2**62), 2**62), tf.int64)}
    else:
        dropout = {}

    with tf.GradientTape() as tape:
        tape.watch(given)
        time = None
        if kind != "none":
            table = ops.BucketTable(given["time"], tf.constant(THRESHOLDS))
            time = table if kind == "buckets" else ops.TimeFunction(kind, given["time"])
        bias = ops.RelativeBias(given.get("position"), time, None if time is None else times)
        splits = _splits(lengths)
        if op == "bias_attention":
            out = ops.bias_attention(given["value"], splits, bias=bias, **masks)
        else:
            more = {"scale": scale, "alpha": 0.7, "bias": bias, **masks, **dropout}
            if op == "gated_attention":
                norm = (given.get("norm_weight"), given.get("norm_bias"))
                more["gate"] = ops.OutputGate(given["gate"], *norm, **form)
            out = ops.jagged_attention(given["query"], given["key"], given["value"], splits, **more)
    columns = value_dim * (("position" in given) + ("time" in given) if op == "bias_attention" else 1)
    gradients = tape.gradient(out, given, normal(asking, heads, columns), unconnected_gradients="zero")
    return [out, *(gradients[name] for name in sorted(gradients))]


def digests() -> dict[str, str]:
    return {f"case {number}": hashes.digest(map(np.asarray, results(number))) for number in range(CASES)}


if __name__ == "__main__":
    engine = sys.argv[1]
    try:
        recorded = hashes.read("attention")
    except FileNotFoundError:
        recorded = {}
    hashes.write("attention", {**recorded, engine: digests()})
