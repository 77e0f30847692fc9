"""Relative position and time bias of the research HSTU: near in the sequence, near in time.

attention.py adds `pair_bias` to its scores; hstu.py owns the two weight tables. Time differences
become bucket numbers by comparison with integer thresholds, so that every machine and every device
finds the same bucket (the published float32 formula gives different buckets under different log
functions). Buckets depend on the timestamps only: make them once per batch with `time_buckets` and
hand them to all blocks of a stack.
"""

from __future__ import annotations

import decimal
import fractions
import functools
from typing import NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import jagged

MAX_TIME_BUCKETS = 145  # the threshold of bucket 146 does not fit int64


class TimeBuckets(NamedTuple):
    """What `time_buckets` makes of timestamps. Hand it on; its layout belongs to this folder."""

    pairs: tf.Tensor  # <int32>[B, n, n], bucket of (asking token, answering token)
    num_buckets: int  # G; buckets are 0 .. G (a scalar tensor once a tf.function has returned it)


class RelativeBias(NamedTuple):
    """Weights of one layer's bias and the buckets of this batch. Shared by all heads."""

    position_weights: tf.Tensor  # <float>[2N-1], index N-1 + (answering place - asking place)
    time_weights: tf.Tensor | None = None  # <float>[G+1] for G time buckets
    buckets: TimeBuckets | None = None  # given exactly when time_weights is


@tf.autograph.experimental.do_not_convert  # plain Python, slow to rewrite
@functools.cache
def bucket_thresholds(num_buckets: int) -> np.ndarray:
    """Smallest time difference of each bucket: integers that reproduce the float32 formula exactly.

    The formula (research HSTU): bucket = clamp(trunc(ln(max(|difference|, 1)) / 0.301), 0,
    num_buckets), each step rounded to float32. With a correctly rounded logarithm every step is
    monotonic, so bucket b begins at one integer. It is found from the last step back to the first,
    in exact arithmetic: quotient >= b  <=>  log >= y, a float32  <=>  float32(difference) >= x  <=>
    difference >= threshold.

    Args:
      num_buckets: G, 1 .. 145.

    Returns:
      <int64>[G]; entry b-1 is where bucket b begins. Bucket 1 is empty (no integer has it): it
      begins with bucket 2.

    Raises:
      ValueError: num_buckets is out of range.
    """
    if not 1 <= num_buckets <= MAX_TIME_BUCKETS:
        raise ValueError(
            f"num_buckets must be 1 .. {MAX_TIME_BUCKETS} (the next begins beyond int64), got {num_buckets}."
        )
    return np.array([_bucket_begin(bucket) for bucket in range(1, num_buckets + 1)], np.int64)


def time_buckets(
    timestamps: tf.RaggedTensor,
    num_buckets: int = 128,
    query_times: tf.RaggedTensor | None = None,
    num_targets: tf.Tensor | None = None,
) -> TimeBuckets:
    """Buckets of all pairs of a batch: bucket(|query_times[i] - timestamps[j]|).

    Args:
      timestamps: RaggedTensor <int64>[B,(L)], seconds; when each token happened.
      num_buckets: G; differences beyond the last threshold share bucket G.
      query_times: RaggedTensor <int64>[B,(L)], seconds; when each token asks. The default is the
        research rule: token i asks at the time of token i+1 (when the answer was wanted), the last
        token at its own time. When the time of the request is known (training to predict a next
        item, serving), give it here.
      num_targets: None or <int>[B]. Affects the default of query_times only: the last history token
        and the targets ask at their own time, so that a target's time reaches no other token.

    Returns:
      TimeBuckets, for `HSTU(...)(x, timestamps=...)` or `RelativeBias`.

    Raises:
      ValueError: timestamps or query_times is not a RaggedTensor of int64.
    """
    _check_times("timestamps", timestamps)
    if query_times is None:
        query_times = _next_times(timestamps, num_targets)
    _check_times("query_times", query_times)
    asks, answers = query_times.to_tensor(), timestamps.to_tensor()
    difference = tf.abs(asks[:, :, tf.newaxis] - answers[:, tf.newaxis, :])
    thresholds = tf.constant(bucket_thresholds(num_buckets))
    buckets = tf.searchsorted(thresholds, tf.reshape(difference, [-1]), side="right")
    return TimeBuckets(tf.reshape(buckets, tf.shape(difference)), num_buckets)


def pair_bias(bias: RelativeBias, lengths: tf.Tensor, longest: tf.Tensor, num_targets: tf.Tensor | None) -> tf.Tensor:
    """The bias of every pair, shared by the heads.

    Position part: position_weights[N-1 + place(j) - place(i)]. All targets of a row share the place
    behind the history, so a target's bias does not depend on how many targets came with it.

    Args:
      bias: the weights and this batch's buckets.
      lengths: <int64>[B].
      longest: <int64>[] n, at most N.
      num_targets: None or <int64>[B].

    Returns:
      <float>[B, n, n]; or <float>[1, n, n] when there is nothing that differs between rows. Entries
      of pairs that attention_mask hides are arbitrary.

    Raises:
      ValueError: time_weights without buckets, or buckets without time_weights.
      InvalidArgumentError: n > N, or the buckets were made from rows of other lengths or with
        another number of buckets.
    """
    _check_time_table(bias)
    weights = bias.position_weights
    centre = tf.shape(weights, tf.int64)[0] // 2
    with tf.control_dependencies(_assertions(bias, lengths, longest, centre + 1)):
        places = tf.range(longest)
    distance = places[tf.newaxis, :] - places[:, tf.newaxis]
    total = _gather_dense_gradient(weights, centre + distance)[tf.newaxis]
    if num_targets is not None:
        # A target asks from the first target's place; itself is the only target it sees, at 0.
        asking_place = tf.minimum(places[tf.newaxis, :], (lengths - num_targets)[:, tf.newaxis])
        total = tf.gather(total[0], asking_place)
        total = tf.linalg.set_diag(total, tf.fill(tf.shape(total)[:2], weights[centre]))
    if bias.time_weights is not None and bias.buckets is not None:
        pairs = bias.buckets.pairs
        flat = tf.reshape(pairs, [tf.shape(pairs)[0], tf.size(pairs[:1])])
        total += tf.reshape(_gather_dense_gradient(bias.time_weights, flat), tf.shape(pairs))
    return total


@tf.custom_gradient
def _gather_dense_gradient(weights, indices):
    """weights[indices], <int>[rows, columns], with a dense gradient in a fixed order of summation.

    tf.gather's own gradient is IndexedSlices with one scalar per pair: the optimizer would sort
    millions of them, and Horovod would gather them from all ranks. A histogram per row, then the
    sum over rows, is quick; each row is summed by one thread, so the result does not depend on
    scheduling.
    """

    def gradient(upstream):
        histogram = tf.raw_ops.DenseBincount(
            input=tf.cast(indices, tf.int32),
            size=tf.shape(weights)[0],
            weights=upstream,
            binary_output=False,
        )
        return tf.reduce_sum(histogram, axis=0), None

    return tf.gather(weights, indices), gradient


def _next_times(timestamps: tf.RaggedTensor, num_targets: tf.Tensor | None) -> tf.RaggedTensor:
    """Time of the next token; the last history token and the targets keep their own."""
    rows, places = jagged.token_places(timestamps.row_splits)
    history = timestamps.row_lengths()
    if num_targets is not None:
        history = history - tf.cast(num_targets, tf.int64)
    tokens = tf.range(tf.size(rows, tf.int64))
    successor = tokens + tf.cast(places + 1 < tf.gather(history, rows), tf.int64)
    return timestamps.with_values(tf.gather(timestamps.values, successor))


def _assertions(bias: RelativeBias, lengths: tf.Tensor, longest: tf.Tensor, max_length: tf.Tensor) -> list:
    checks = [
        tf.debugging.assert_less_equal(
            longest,
            max_length,
            message="a row is longer than N of position_weights [2N-1]; trim it, or raise N",
        )
    ]
    if bias.time_weights is not None and bias.buckets is not None:
        checks.append(
            tf.debugging.assert_equal(
                tf.shape(bias.time_weights)[0] - 1,
                bias.buckets.num_buckets,
                message="time buckets must be made with as many num_buckets as the layer's time_buckets",
            )
        )
        checks.append(
            tf.debugging.assert_equal(
                tf.shape(bias.buckets.pairs, tf.int64),
                tf.stack([tf.size(lengths, tf.int64), longest, longest]),
                message="timestamps must have the row lengths of the sequence",
            )
        )
    return [check for check in checks if check is not None]


def _check_time_table(bias: RelativeBias) -> None:
    if (bias.time_weights is None) != (bias.buckets is None):
        raise ValueError("time_weights and buckets must be given together, got only one of them.")


def _check_times(name: str, times: tf.RaggedTensor) -> None:
    jagged.check_sequence(name, times)
    if times.dtype != tf.int64:
        raise ValueError(f"{name} must be int64 seconds, got {times.dtype.name}. Cast with tf.cast(x, tf.int64).")


def _bucket_begin(bucket: int) -> int:
    """Smallest integer d > 0 with float32(float32(ln(float32(d))) / float32(0.301)) >= bucket."""
    divisor = fractions.Fraction(float(np.float32(0.301)))
    # A bucket number is a float32 with an even mantissa, so a quotient exactly half way below it
    # rounds up to it.
    log = _float32_at_or_above(_half_way_below(np.float32(bucket)) * divisor)
    with decimal.localcontext() as context:
        context.prec = 60
        half_way = _half_way_below(log)
        # e to a rational is irrational: it never equals a float32, and ties cannot occur.
        number = fractions.Fraction((decimal.Decimal(half_way.numerator) / half_way.denominator).exp())
    rounds_to = _float32_at_or_above(number)
    begin = max(int(_half_way_below(rounds_to)) - 1, 1)
    while np.int64(begin).astype(np.float32) < rounds_to:  # np.float32(int) would round twice
        begin += 1
    return begin


def _half_way_below(number: np.float32) -> fractions.Fraction:
    """The point between `number` and the float32 below it; above it reals round to `number`."""
    below = np.nextafter(number, np.float32(-np.inf))
    return (fractions.Fraction(float(below)) + fractions.Fraction(float(number))) / 2


def _float32_at_or_above(number: fractions.Fraction) -> np.float32:
    candidate = np.float32(float(number))
    while fractions.Fraction(float(candidate)) >= number:
        candidate = np.nextafter(candidate, np.float32(-np.inf))
    return np.nextafter(candidate, np.float32(np.inf))
