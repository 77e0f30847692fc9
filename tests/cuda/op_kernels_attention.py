"""Attention, the channels of FuXi and a block of its layers: the same inputs to kernels of both kinds."""

from __future__ import annotations

import numpy as np

from tests.cuda.op_kernels import refused, run_op
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

SPLITS = np.array([0, 3, 3, 20], np.int64)
FEWER = np.array([0, 2, 2, 9], np.int64)  # queries of the last tokens of each row
# float32 sums run in another order with another exponential; 16-bit numbers and maps are rounded, twice the last place.
NEAR = {tf.float32: 2e-5, tf.float16: 2.0**-9, tf.bfloat16: 2.0**-6}
KINDS = {"power": [0.7, 0.1], "exponential": [-0.4, -6.0], "stretched": [0.6, -4.0, 0.3]}


def attention(query, key, value, splits, grads, query_splits=None):
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        out = ops.jagged_attention(query, key, value, splits, scale=0.1, query_splits=query_splits)
    return out, tape.gradient(out, [query, key, value], grads)


def biased(query, key, value, splits, position, weights, thresholds, asks, answers, grads, *, kind, first=0):
    time = ops.BucketTable(weights, thresholds) if kind == "buckets" else ops.TimeFunction(kind, weights)
    given = [query, key, value, position, weights]
    with tf.GradientTape() as tape:
        tape.watch(given)
        bias = ops.RelativeBias(position, time, ops.SequenceTimes(asks, answers))
        out = ops.jagged_attention(
            query, key, value, splits, scale=0.1, bias=bias, attention_window=3 if first else 0, global_window=first,
            dropout=0.3, dropout_seed=2**40 + 7,
        )  # fmt: skip
    return out, tape.gradient(out, given, grads)


def gated(query, key, value, splits, gate, grads, weight=None, bias=None, *, per_head, gate_first):
    given = [query, key, value, gate] + ([] if weight is None else [weight, bias])
    with tf.GradientTape() as tape:
        tape.watch(given)
        form = ops.OutputGate(gate, weight, bias, per_head, gate_first, epsilon=1e-2)
        out = ops.gated_attention(query, key, value, splits, scale=0.1, gate=form)
    return out, tape.gradient(out, given, grads)


def channels(
    value, splits, targets, position, weights, thresholds, asks, answers, grads, query_splits=None, *, kind, window=0
):
    """Returns out and the gradients of value and of the weights. kind: buckets, a function of time, or none."""
    time = None
    if kind is not None:
        time = ops.BucketTable(weights, thresholds) if kind == "buckets" else ops.TimeFunction(kind, weights)
    bias = ops.RelativeBias(position, time, None if time is None else ops.SequenceTimes(asks, answers))
    with tf.GradientTape() as tape:
        tape.watch([value, position, weights])
        out = ops.bias_attention(
            value, splits, bias=bias, num_targets=targets, attention_window=window, query_splits=query_splits
        )
    sources = [value, position] if time is None else [value, position, weights]
    return out, tape.gradient(out, sources, grads[:, :, : tf.shape(out)[2]])


def near(op, arguments, dtype=tf.float32, **more):
    host, device = (tf.nest.flatten(run_op(on_device, op, arguments, **more)) for on_device in (False, True))
    for theirs, ours in zip(host, device):
        theirs, ours = (np.asarray(tf.cast(x, tf.float32)) for x in (theirs, ours))
        largest = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=NEAR[dtype] * largest)


def inputs(random, dtype, kind):
    """Returns the arguments of `channels`."""
    answers = np.cumsum(random.integers(0, 60, 20))
    weights = np.array(KINDS[kind], np.float32) if kind in KINDS else random.normal(size=5).astype(np.float32)
    position = random.normal(size=2 * 17 - 1).astype(np.float32)
    value, grads = (tf.cast(random.normal(size=[20, 2, dim]), dtype) for dim in (6, 12))
    targets, thresholds = np.array([1, 0, 4]), np.array([0, 1, 40, 200])
    return value, SPLITS, targets, position, weights, thresholds, answers + random.integers(0, 9, 20), answers, grads


def run_attention(random):
    query, key, value, grads = (random.normal(size=[20, 2, 32]).astype(np.float32) for _ in range(4))
    near(attention, (query, key, value, SPLITS, grads))
    near(attention, (query[:9], key, value, SPLITS, grads[:9], FEWER))
    near(attention, (query[:0], key, value, SPLITS, grads[:0], 0 * FEWER))
    wrong, wide = tf.errors.InvalidArgumentError, np.zeros([20, 1, 257], np.float32)
    decreasing = np.array([0, 5, 3, 20])
    too_many = np.array([0, 4, 4, 9])
    refused(
        wrong, "query_splits must give row 0 at most one query per token",
        lambda: run_op(True, attention, (query[:9], key, value, SPLITS, grads[:9], too_many)),
    )  # fmt: skip
    refused(
        wrong, "query_splits must run from 0 to 8",
        lambda: run_op(True, attention, (query[:8], key, value, SPLITS, grads[:8], FEWER)),
    )  # fmt: skip
    refused(
        wrong, "row_splits must not decrease", lambda: run_op(True, attention, (query, key, value, decreasing, grads))
    )
    long = np.zeros([2**31, 1, 0], np.float32)  # no bytes
    refused(
        wrong, "the number of tokens must be at most 2147483647",
        lambda: run_op(True, attention, (long, long, long, np.array([0, 2**31]), long)),
    )  # fmt: skip
    refused(wrong, "at most 256 columns", lambda: run_op(True, attention, (wide, wide, wide, SPLITS, wide)))


def run_biased(random):
    query, key, value, grads = (random.normal(size=[20, 2, 8]).astype(np.float32) for _ in range(4))
    for number, kind in enumerate(("buckets", *KINDS)):
        _, _, _, position, weights, thresholds, asks, answers, _ = inputs(random, tf.float32, kind)
        arguments = (query, key, value, SPLITS, position, weights, thresholds, asks, answers, grads)
        near(biased, arguments, kind=kind, first=2 * (number % 2))


def run_gated(random):
    tokens = [random.normal(size=[20, 2, 32]).astype(np.float32) for _ in range(5)]
    weights = [random.normal(size=64).astype(np.float32) for _ in range(2)]
    for number, dtype in enumerate(NEAR):
        query, key, value, gate, grads = (tf.cast(x, dtype) for x in tokens)
        arguments = (query, key, value, SPLITS, gate, grads, *(weights if number != 1 else ()))
        # The CPU kernel gates the attention before it is rounded.
        near(gated, arguments, dtype, per_head=number == 2, gate_first=number == 1)
    query, key, value, gate, grads = tokens
    near(
        gated,
        (query[:0], key[:0], value[:0], 0 * SPLITS, gate[:0], grads[:0], *weights),
        per_head=False,
        gate_first=False,
    )
    wrong = (query, key, value, SPLITS, gate[:19], grads)
    refused(
        tf.errors.InvalidArgumentError, "gate must have the shape of the attention",
        lambda: run_op(True, gated, wrong, per_head=False, gate_first=False),
    )  # fmt: skip


def run_channels(random):
    for number, kind in enumerate(("buckets", None, *KINDS)):
        dtype = tuple(NEAR)[number % 3]
        near(channels, inputs(random, dtype, kind), dtype, kind=kind, window=5 * (number % 2))
        *rest, asks, answers, grads = inputs(random, dtype, kind)
        near(channels, (*rest, asks[:9], answers, grads[:9], FEWER), dtype, kind=kind)
    nothing = inputs(random, tf.float32, "buckets")
    empty = [nothing[0][:0], np.zeros(1, np.int64), nothing[2][:0], *nothing[3:6], *(x[:0] for x in nothing[6:])]
    near(channels, empty, kind="buckets")
    near(channels, [nothing[0][:, :, :0], *nothing[1:8], nothing[8][:, :, :0]], kind="buckets")


def run_refusals(random):
    """Unsuitable inputs give a Status."""
    right = dict(enumerate(inputs(random, tf.float32, "buckets")))
    for place, value, words in (
        (1, np.array([0, 5, 3, 20]), "row_splits must not decrease"), (1, np.array([0, 19]), "must run from 0 to 20"),
        (2, np.array([1, 1, 4]), "num_targets[1] must lie between 0"), (2, np.array([-1, 0, 4]), "num_targets[0] must"),
        (2, np.array([1]), "num_targets must have one entry per row"), (3, np.zeros(4, np.float32), "2N - 1 entries"),
        (3, np.zeros(31, np.float32), "longer than N = 16"), (4, np.zeros(4, np.float32), "one entry more than"),
        (5, np.array([0, 3, 2, 9]), "thresholds must not decrease"), (6, np.arange(19), "asks must have one time per"),
        (7, np.arange(21), "answers must have one time per"),
    ):  # fmt: skip
        wrong = tuple({**right, place: value}.values())
        refused(tf.errors.InvalidArgumentError, words, lambda: run_op(True, channels, wrong, kind="buckets"))  # noqa: B023
    long = np.zeros([2**31, 1, 0], np.float32)  # no bytes
    refused(
        tf.errors.InvalidArgumentError, "the number of tokens must be at most 2147483647",
        lambda: run_op(True, channels, tuple({**right, 0: long, 8: long}.values()), kind="buckets"),
    )  # fmt: skip
    many = tuple({**right, 4: np.zeros(4098, np.float32), 5: np.arange(4097)}.values())
    refused(
        tf.errors.InvalidArgumentError, "thresholds must be at most 4096",
        lambda: run_op(True, channels, many, kind="buckets"),
    )  # fmt: skip


def run():
    random = np.random.default_rng(0)
    run_attention(random)
    run_biased(random)
    run_gated(random)
    run_channels(random)
    run_refusals(random)
