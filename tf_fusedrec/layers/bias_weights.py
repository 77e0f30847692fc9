"""Trained weights of a block's relative bias, a function of two tokens' distance in position and in time.

hstu.py adds the bias to its scores. fuxi.py uses it as separate attention maps. This file holds the tables and scalars;
the op evaluates the bias pair by pair inside its tiles (ops/jagged_attention.py).
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers.relative_bias import MAX_TIME_BUCKETS, bucket_thresholds
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
TIME_ENCODINGS = ("none", "buckets", *_FUNCTIONS)


class BiasWeights(keras.layers.Layer):
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
        self.max_sequence_length = max_sequence_length
        self.position = position
        self.time_encoding = time_encoding
        self.time_buckets = time_buckets

    def build(self, input_shape=None):
        if self.position:
            self.position_weights = self.add_weight(
                "position_weights", [2 * self.max_sequence_length - 1], initializer=_small_normal()
            )
        if self.time_encoding == "buckets":
            self.time_weights = self.add_weight("time_weights", [self.time_buckets + 1], initializer=_small_normal())
        else:
            self.time_scalars = [
                self.add_weight(f"time_{name}", [], initializer=keras.initializers.RandomUniform(low, high))
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

    def get_config(self):
        return {
            **super().get_config(),
            "max_sequence_length": self.max_sequence_length,
            "position": self.position,
            "time_encoding": self.time_encoding,
            "time_buckets": self.time_buckets,
        }

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
    if max_sequence_length < 1:
        raise ValueError(f"max_sequence_length must be >= 1, got {max_sequence_length}.")
    if time_encoding not in TIME_ENCODINGS:
        raise ValueError(f"time_encoding must be one of {TIME_ENCODINGS}, got {time_encoding!r}.")
    if not 1 <= time_buckets <= MAX_TIME_BUCKETS:
        raise ValueError(f"time_buckets must be 1 .. {MAX_TIME_BUCKETS}, got {time_buckets}.")


def _small_normal() -> keras.initializers.Initializer:
    """Returns a new initializer, because one tf_keras initializer draws the same numbers for every weight."""
    return keras.initializers.RandomNormal(stddev=0.02)
