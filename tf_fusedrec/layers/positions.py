"""The input layer of the production operators: scaled token embeddings plus distance from the end and age.

positions.py is the input layer of the research models, which count positions from the start of the row.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import SequenceLayer, check_choice, check_positive
from tf_fusedrec.ops import contextual_lengths

_SECONDS = 60  # Seconds in one unit of age.


@keras.saving.register_keras_serializable("tf_fusedrec")
class PositionTimeEmbedding(SequenceLayer):
    """Computes x * sqrt(D) + positions[row] + ages[bucket].

    The row of context token p is p. The row of any other token is C + (end of history - its position), and C for all
    targets. Tokens beyond the table share its last row.
    The bucket is trunc(sqrt(age)) or trunc(ln(age)), at most time_buckets. The age of a token is the time from it to
    the row's last token, in minutes. Integer thresholds, not a float function, decide the bucket.

    Args:
      num_positions: Rows of the position table.
      time_buckets: J. The time table has J+1 rows.
      time_bucket_function: "sqrt" or "log".

    Call:
      x: RaggedTensor <float>[B,(L),D].
      timestamps: RaggedTensor <int64>[B,(L)] in seconds.
      num_targets: None or <int>[B], number of targets at the end of each row.
      contextual_length: C, number of context tokens at the start of each row: an int, or <int>[B] by row.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range, or x or timestamps is not ragged.
      InvalidArgumentError: The row lengths of timestamps differ from x's.

    Source: add_timestamp_positional_embeddings of the public HSTU operators. One of its two implementations limits the
    bucket to the number of COLUMNS of the time table. This layer limits it to the rows, like the other.

    Examples:
      >>> x = tf.RaggedTensor.from_row_lengths(tf.ones([5, 8]), [3, 2])
      >>> seconds = tf.RaggedTensor.from_row_lengths(tf.constant([10, 20, 60, 5, 7], tf.int64), [3, 2])
      >>> fr.layers.PositionTimeEmbedding(num_positions=16)(x, seconds).shape
      TensorShape([2, None, 8])
    """

    def __init__(
        self, num_positions: int, time_buckets: int = 2048, time_bucket_function: str = "sqrt", **layer_arguments
    ):
        super().__init__(**layer_arguments)
        check_positive(num_positions=num_positions, time_buckets=time_buckets)
        check_choice("time_bucket_function", time_bucket_function, ("sqrt", "log"))
        self._configure(locals())

    def build(self, input_shape):
        columns = input_shape[-1]
        for name, rows in (("positions", self.num_positions), ("ages", self.time_buckets + 1)):
            initializer = keras.initializers.TruncatedNormal(stddev=columns**-0.5)
            setattr(self, name, self.add_weight(name=name, shape=[rows, columns], initializer=initializer))
        super().build(input_shape)

    def call(self, x, timestamps, num_targets=None, contextual_length=0):
        jagged.check_sequence("x", x)
        jagged.check_sequence("timestamps", timestamps)
        same = tf.debugging.assert_equal(
            x.row_splits, timestamps.row_splits, message="timestamps must have the row lengths of x"
        )
        with tf.control_dependencies([] if same is None else [same]):
            rows, positions = jagged.token_positions(x.row_splits)
        history_end = x.row_lengths()
        if num_targets is not None:
            history_end -= tf.cast(num_targets, tf.int64)
        context = contextual_lengths(contextual_length, x.row_splits)
        context = tf.zeros_like(positions) if context is None else tf.gather(context, rows)
        from_end = tf.maximum(tf.gather(history_end, rows) - positions, 0) + context
        position = tf.where(positions < context, positions, tf.minimum(from_end, self.num_positions - 1))
        # No token reads the last token of an empty row. Its index is only kept in range.
        last = tf.maximum(timestamps.row_limits() - 1, 0)
        age = tf.gather(timestamps.values, tf.gather(last, rows)) - timestamps.values
        bucket = tf.searchsorted(tf.constant(self._thresholds()), age, side="right")
        tables = ((self.positions, position), (self.ages, bucket))
        added = tf.add_n([jagged.gather_rows(tf.convert_to_tensor(table), index) for table, index in tables])
        return x.with_values(x.values * x.shape[-1] ** 0.5 + added)

    def _thresholds(self) -> np.ndarray:
        """Returns <int64>[J], the smallest age in seconds of buckets 1 .. J.

        Ages of log buckets above 38 do not fit in an int64. Such a threshold is the largest int64, which no age
        reaches.
        """
        bucket = np.arange(1, self.time_buckets + 1, dtype=np.float64)
        if self.time_bucket_function == "sqrt":
            return (_SECONDS * bucket**2).astype(np.int64)
        thresholds = np.full(self.time_buckets, np.iinfo(np.int64).max)
        thresholds[:38] = np.ceil(_SECONDS * np.exp(bucket[:38]))
        return thresholds


@keras.saving.register_keras_serializable("tf_fusedrec")
class PositionEmbedding(SequenceLayer):
    """Computes dropout(x * sqrt(D) + positions[position]), the input rule of the public HSTU experiments.

    All targets of a row share the position after the history, like the candidates of the HSTU operators. A target's
    input therefore does not depend on the number of targets.

    Args:
      max_sequence_length: N, rows of the position table and the longest sequence allowed.
      dropout: Fraction of the result's columns that is dropped in training.

    Call:
      x: RaggedTensor <float>[B,(L),D], every L <= N.
      num_targets: None or <int>[B], number of targets at the end of each row.
      before: None or <int64>[B], tokens of each row before x. A server keeps their state.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range, or x is not a RaggedTensor.
      InvalidArgumentError: A row, with the tokens before x, is longer than N.
    """

    def __init__(self, max_sequence_length: int, dropout: float = 0.0, **layer_arguments):
        super().__init__(**layer_arguments)
        check_positive(max_sequence_length=max_sequence_length)
        self._configure(locals(), dropout=keras_api.Dropout(dropout, dtype=self.dtype_policy))

    def build(self, input_shape):
        columns = input_shape[-1]
        self.positions = self.add_weight(
            name="positions",
            shape=[self.max_sequence_length, columns],
            initializer=keras.initializers.TruncatedNormal(stddev=columns**-0.5),
        )
        super().build(input_shape)

    def call(self, x, num_targets=None, before=None, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name, before)
        rows, positions = jagged.token_positions(x.row_splits)
        if num_targets is not None:
            positions = tf.minimum(positions, tf.gather(x.row_lengths() - tf.cast(num_targets, tf.int64), rows))
        if before is not None:
            positions += tf.gather(before, rows)
        embedded = jagged.gather_rows(tf.convert_to_tensor(self.positions), positions)
        return x.with_values(self.dropout(x.values * x.shape[-1] ** 0.5 + embedded, training=training))
