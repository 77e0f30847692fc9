"""Trained weights of a block's relative bias, a function of two tokens' distance in position and in time.

hstu.py adds the bias to its scores. fuxi.py uses it as separate attention maps. The op evaluates the bias pair by pair
inside its tiles (ops/attention.py). The layers pass integer thresholds of the time buckets, so that every machine and
device finds the same bucket: the published float32 formula depends on the log function.
"""

from __future__ import annotations

import decimal
import fractions
import functools

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import TIME_ENCODINGS
from tf_fusedrec.layers.base import ConfiguredLayer, check_choice, check_positive
from tf_fusedrec.ops import BucketTable, RelativeBias, SequenceTimes, TimeFunction, sequence_times

# Initial ranges of the scalars, by kind of the op's function. d is in seconds.
_FUNCTIONS = {
    # a (d + 1)^-b, with the ranges of FuXi-beta's code.
    "power": {"a": (-0.2, 0.2), "b": (0.4, 0.8)},
    # a exp(-exp(b) d). We do not know the range of b in the source's code; ours gives scales of one hour to two days.
    "exponential": {"a": (-0.2, 0.2), "b": (-12.0, -8.0)},
    # alpha exp(-softplus(c) (d + 1)^beta), FuXi-gamma. Its parameters are unpublished; ours give scales of hours.
    "stretched": {"alpha": (-0.2, 0.2), "c": (-3.0, -2.0), "beta": (0.25, 0.35)},
}


class BiasWeights(ConfiguredLayer):
    """A position table and a table or function of time, which the heads of one block share.

    The weights are float32 under every mixed precision policy, because one entry serves thousands of pairs.

    Args:
      max_sequence_length: N, at least the longest row.
      position: True to have a position table.
      time_encoding: Form of the time bias, one of TIME_ENCODINGS.
      time_buckets: J. The table of "buckets" has J+1 rows.

    Call:
      row_splits: <int64>[B+1] of the sequences.
      timestamps: RaggedTensor <int64>[B,(L)] in seconds, or SequenceTimes, which a stack computes once. None exactly
        when time_encoding is "none".
      num_targets: None or <int>[B]. The tokens' query times depend on it; see ops.sequence_times.
      returns RelativeBias, or None without a position table and a time encoding.

    Raises:
      ValueError: An argument is out of range, or timestamps are missing or unexpected.
      InvalidArgumentError: The row lengths of timestamps differ from the sequences'.
    """

    def __init__(
        self,
        max_sequence_length: int,
        position: bool = True,
        time_encoding: str = "buckets",
        time_buckets: int = 128,
        **layer_arguments,
    ):
        super().__init__(**{**layer_arguments, "dtype": "float32"})
        check_bias_arguments(max_sequence_length, time_encoding, time_buckets)
        self._configure(locals())

    def build(self, input_shape=None):
        if self.position:
            self.position_weights = self.add_weight(
                name="position_weights", shape=[2 * self.max_sequence_length - 1], initializer=_small_normal()
            )
        if self.time_encoding == "buckets":
            self.time_weights = self.add_weight(
                name="time_weights", shape=[self.time_buckets + 1], initializer=_small_normal()
            )
        else:
            self.time_scalars = [
                self.add_weight(name=f"time_{name}", shape=[], initializer=keras.initializers.RandomUniform(low, high))
                for name, (low, high) in _FUNCTIONS.get(self.time_encoding, {}).items()
            ]
        super().build(input_shape)

    def call(
        self,
        row_splits: tf.Tensor,
        timestamps: tf.RaggedTensor | SequenceTimes | None = None,
        num_targets: tf.Tensor | None = None,
    ) -> RelativeBias | None:
        self._check_times(timestamps)
        positions = tf.convert_to_tensor(self.position_weights) if self.position else None
        if timestamps is None:
            return None if positions is None else RelativeBias(positions)
        times = timestamps
        if isinstance(times, tf.RaggedTensor):
            same = tf.debugging.assert_equal(
                times.row_splits, row_splits, message="timestamps must have the row lengths of the sequence"
            )
            with tf.control_dependencies([] if same is None else [same]):
                times = sequence_times(times, num_targets=num_targets)
        return RelativeBias(positions, self._time(), times)

    def _time(self) -> BucketTable | TimeFunction:
        if self.time_encoding == "buckets":
            thresholds = tf.constant(bucket_thresholds(self.time_buckets))
            return BucketTable(tf.convert_to_tensor(self.time_weights), thresholds)
        return TimeFunction(self.time_encoding, tf.stack([tf.convert_to_tensor(s) for s in self.time_scalars]))

    def _check_times(self, timestamps: tf.RaggedTensor | SequenceTimes | None) -> None:
        if self.time_encoding != "none" and timestamps is None:
            raise ValueError(
                f"layer {self.name!r} has a time bias and needs timestamps, got None. "
                'Pass timestamps=, or build the layer with time_encoding="none".'
            )
        if self.time_encoding == "none" and timestamps is not None:
            raise ValueError(
                f"layer {self.name!r} has no time bias, but got timestamps. Omit them, or "
                f"build the layer with one of time_encoding={TIME_ENCODINGS[1:]}."
            )


def check_bias_arguments(max_sequence_length: int, time_encoding: str, time_buckets: int) -> None:
    """Raises ValueError when BiasWeights would refuse an argument."""
    check_positive(max_sequence_length=max_sequence_length)
    check_choice("time_encoding", time_encoding, TIME_ENCODINGS)
    if not 1 <= time_buckets <= MAX_TIME_BUCKETS:
        raise ValueError(f"time_buckets must be 1 .. {MAX_TIME_BUCKETS}, got {time_buckets}.")


def _small_normal() -> keras.initializers.Initializer:
    """Returns a new initializer, because one tf_keras initializer draws the same numbers for every weight."""
    return keras.initializers.RandomNormal(stddev=0.02)


MAX_TIME_BUCKETS = 145  # The threshold of bucket 146 does not fit int64.


@functools.cache
def bucket_thresholds(num_buckets: int) -> np.ndarray:
    """Returns the smallest time difference of each bucket, which reproduces the float32 formula exactly.

    The formula (research HSTU) is bucket = clamp(trunc(ln(max(|difference|, 1)) / 0.301), 0, num_buckets), with every
    step rounded to float32. With a correctly rounded logarithm every step is monotonic, so bucket b begins at one
    integer. Exact arithmetic finds it backwards from the last step: quotient >= b  <=>  log >= y, a float32  <=>
    float32(difference) >= x  <=>  difference >= threshold.

    Args:
      num_buckets: J, 1 .. 145.

    Returns:
      <int64>[J]. Entry b-1 is the smallest difference of bucket b. No integer is in bucket 1, so its entry equals
      bucket 2's.

    Raises:
      ValueError: num_buckets is out of range.
    """
    if not 1 <= num_buckets <= MAX_TIME_BUCKETS:
        raise ValueError(
            f"num_buckets must be 1 .. {MAX_TIME_BUCKETS} (the next begins beyond int64), got {num_buckets}."
        )
    return np.array([_bucket_begin(bucket) for bucket in range(1, num_buckets + 1)], np.int64)


def _bucket_begin(bucket: int) -> int:
    """Returns the smallest integer d > 0 with float32(float32(ln(float32(d))) / float32(0.301)) >= bucket."""
    divisor = fractions.Fraction(float(np.float32(0.301)))
    # A bucket number is a float32 with an even mantissa, so a quotient exactly half way below it rounds up to it.
    log = _float32_at_or_above(_half_way_below(np.float32(bucket)) * divisor)
    with decimal.localcontext() as context:
        context.prec = 60
        half_way = _half_way_below(log)
        # e to a rational is irrational, so it never equals a float32 and no tie occurs.
        number = fractions.Fraction((decimal.Decimal(half_way.numerator) / half_way.denominator).exp())
    rounds_to = _float32_at_or_above(number)
    begin = max(int(_half_way_below(rounds_to)) - 1, 1)
    while np.int64(begin).astype(np.float32) < rounds_to:  # np.float32(int) would round twice.
        begin += 1
    return begin


def _half_way_below(number: np.float32) -> fractions.Fraction:
    """Returns the midpoint of `number` and the float32 below it. Reals above the midpoint round to `number`."""
    below = np.nextafter(number, np.float32(-np.inf))
    return (fractions.Fraction(float(below)) + fractions.Fraction(float(number))) / 2


def _float32_at_or_above(number: fractions.Fraction) -> np.float32:
    candidate = np.float32(float(number))
    while fractions.Fraction(float(candidate)) >= number:
        candidate = np.nextafter(candidate, np.float32(-np.inf))
    return np.nextafter(candidate, np.float32(np.inf))
