"""The input layer of a stack of HSTU blocks: scaled token embeddings plus learned positions.

It is the first layer of the dense model, between FusedEmbedding and hstu.py.
"""

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import jagged


class PositionEmbedding(keras.layers.Layer):
    """Computes dropout(x * sqrt(D) + positions[position]), the input rule of the public HSTU experiments.

    All targets of a row share the position after the history, like the candidates of the HSTU operators. A target's
    input therefore does not depend on the number of targets.

    Args:
      max_sequence_length: N, rows of the position table and the longest sequence allowed.
      dropout: Fraction of the result's columns that is dropped in training.

    Call:
      x: RaggedTensor <float>[B,(L),D], every L <= N.
      num_targets: None or <int>[B], number of targets at the end of each row.
      before: None or <int64>[B], tokens of each row before x, whose state a server keeps.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range, or x is not a RaggedTensor.
      InvalidArgumentError: A row, with the tokens before x, is longer than N.
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

    def call(self, x, num_targets=None, before=None, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name, before)
        rows, positions = jagged.token_positions(x.row_splits)
        if num_targets is not None:
            positions = tf.minimum(positions, tf.gather(x.row_lengths() - tf.cast(num_targets, tf.int64), rows))
        if before is not None:
            positions += tf.gather(before, rows)
        embedded = jagged.gather_rows(tf.convert_to_tensor(self.positions), positions)
        return x.with_values(self.dropout(x.values * x.shape[-1] ** 0.5 + embedded, training=training))

    def get_config(self):
        return {
            **super().get_config(),
            "max_sequence_length": self.max_sequence_length,
            "dropout": self.dropout.rate,
        }
