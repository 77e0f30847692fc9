"""The input of a stack of HSTU blocks: scaled token embeddings plus learned positions.

First layer of the dense model: takes what FusedEmbedding answers, hands its result to hstu.py.
"""

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import jagged


class PositionEmbedding(keras.layers.Layer):
    """dropout(x * sqrt(D) + position[place]): the input rule of the public HSTU experiments.

    All targets of a row share the place behind the history, as the candidates of the HSTU operators
    do, so that a target's input does not depend on how many targets came with it.

    Args:
      max_sequence_length: N, rows of the position table and the longest sequence allowed.
      dropout: fraction of the result's columns that is dropped in training.

    Call:
      x: RaggedTensor <float>[B,(L),D], every L <= N.
      num_targets: None or <int>[B], targets at the end of each row.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: an argument out of range, or x is not a RaggedTensor.
      InvalidArgumentError: a row is longer than N.
    """

    def __init__(self, max_sequence_length: int, dropout: float = 0.0, **layer_arguments):
        super().__init__(**layer_arguments)
        if max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be >= 1, got {max_sequence_length}.")
        self.max_sequence_length = max_sequence_length
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape):
        columns = input_shape[-1]
        self.positions = self.add_weight(
            "positions",
            [self.max_sequence_length, columns],
            initializer=keras.initializers.TruncatedNormal(stddev=columns**-0.5),
        )
        super().build(input_shape)

    def call(self, x, num_targets=None, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name)
        rows, places = jagged.token_places(x.row_splits)
        if num_targets is not None:
            places = tf.minimum(places, tf.gather(x.row_lengths() - tf.cast(num_targets, tf.int64), rows))
        positions = jagged.gather_rows(tf.convert_to_tensor(self.positions), places)
        return x.with_values(self.dropout(x.values * x.shape[-1] ** 0.5 + positions, training=training))

    def get_config(self):
        return {
            **super().get_config(),
            "max_sequence_length": self.max_sequence_length,
            "dropout": self.dropout.rate,
        }
