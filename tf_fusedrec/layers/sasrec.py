"""SASRec block, the baseline of the sequence models: causal softmax attention and a small feed-forward network."""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import AttentionState, SequenceBlock, check_positive

_EPSILON = 1e-8  # Epsilon of this model's norms in the public experiments.


@keras.saving.register_keras_serializable("tf_fusedrec")
class SASRec(SequenceBlock):
    """Self-attentive sequential recommendation block over ragged sequences, as in the public HSTU experiments.

      q = LN(x);  h = LN(q + MultiHead(query=q, key=x, value=x));  out = h + dropout(dropout(relu(h W1 + b1)) W2 + b2)
    LN has no weights and epsilon 1e-8. MultiHead is causal softmax attention with the factor 1 / sqrt(D / H), biases,
    and dropout of its weights in training.

    Plain TensorFlow computes the softmax attention and pads the batch to its longest row inside this layer.
    layers.jagged_attention has no softmax: its SiLU weights need no sum over a row. All other steps use jagged tokens.

    Args:
      num_heads: Number of heads H, a divisor of D.
      ffn_units: Hidden columns of the feed-forward network.
      max_sequence_length: N, at least the longest row.
      dropout: Dropout rate of the attention's weights and, twice, of the feed-forward network.

    Call:
      x: RaggedTensor <float>[B,(L),D].
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range, H does not divide D, or x is not ragged.
      InvalidArgumentError: A row is longer than max_sequence_length.

    Source: Kang and McAuley, Self-Attentive Sequential Recommendation (ICDM 2018), in the form of the baseline of Zhai
    et al. (ICML 2024).

    Examples:
      >>> x = tf.RaggedTensor.from_row_lengths(tf.ones([5, 8]), [3, 2])
      >>> fr.layers.SASRec(num_heads=2, max_sequence_length=16)(x).shape
      TensorShape([2, None, 8])
    """

    def __init__(
        self,
        num_heads: int = 1,
        ffn_units: int = 50,
        max_sequence_length: int = 211,
        dropout: float = 0.0,
        **layer_arguments,
    ):
        super().__init__(**layer_arguments)
        check_positive(num_heads=num_heads, ffn_units=ffn_units, max_sequence_length=max_sequence_length)
        self._configure(locals(), dropout=keras_api.Dropout(dropout, dtype=self.dtype_policy))

    def build(self, input_shape):
        columns = input_shape[-1]
        if columns % self.num_heads:
            raise ValueError(f"num_heads must divide the columns of x, got {self.num_heads} heads for {columns}.")
        self.query, self.key_value, self.attention_output, self.ffn_hidden, self.ffn_output = layers = [
            keras.layers.Dense(
                units,
                activation,
                kernel_initializer=keras.initializers.GlorotNormal(),
                dtype=self.dtype_policy,
                name=name,
            )
            for name, units, activation in (
                ("query", columns, None),
                ("key_value", 2 * columns, None),
                ("attention_output", columns, None),
                ("ffn_hidden", self.ffn_units, "relu"),
                ("ffn_output", columns, None),
            )
        ]
        for layer in layers:
            with tf.name_scope(layer.name):
                layer.build((None, self.ffn_units if layer is self.ffn_output else columns))
        super().build(input_shape)

    def call(self, x, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name)
        normalized, key, value = self._project(x.values)
        attended = self._attend(self.query(normalized), key, value, x.row_splits, x.row_splits, training)
        return self._finish(x, normalized, attended, training)

    def attend(  # type: ignore[override]
        self, x: tf.RaggedTensor, state: AttentionState | None = None
    ) -> tuple[tf.RaggedTensor, AttentionState]:
        x = self._cast(x)
        normalized, key, value = self._project(x.values)
        new, rows, _ = self._grown(x, state, key, value)
        keys, values, splits = rows.keys.values, rows.values.values, rows.values.row_splits
        attended = self._attend(self.query(normalized), keys, values, splits, x.row_splits, False)
        return self._finish(x, normalized, attended, False), new

    def _project(self, tokens: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the normalized tokens <float>[T, D], and keys and values by head."""
        width = tokens.shape[-1] // self.num_heads
        key, value = (self._heads(part, width) for part in tf.split(self.key_value(tokens), 2, axis=-1))
        return jagged.layer_norm(tokens, _EPSILON), key, value

    def _finish(
        self, x: tf.RaggedTensor, normalized: tf.Tensor, attended: tf.Tensor, training: bool | None
    ) -> tf.RaggedTensor:
        hidden = jagged.layer_norm(normalized + self.attention_output(attended), _EPSILON)
        inner = self.dropout(self.ffn_hidden(hidden), training=training)
        return x.with_values(hidden + self.dropout(self.ffn_output(inner), training=training))

    def forward_flops(self, row_splits: tf.Tensor, columns: int) -> tf.Tensor:
        """Counts multiplications and additions of the matrix products, <float64>[], over visible pairs only."""
        per_token = 2 * columns * (4 * columns + 2 * self.ffn_units)
        return self._flops(row_splits, per_token, 2 * 2 * columns)

    def _attend(self, query, key, value, row_splits, query_splits, training):
        """Computes causal softmax attention of the last tokens of each row, <float>[Tq, D].

        It pads inside and computes in float32. query: <float>[Tq, D]; key, value: <float>[T, H, D / H].
        """
        queries = jagged.padded(self._heads(query, key.shape[-1]), query_splits)
        keys, values = (jagged.padded(tokens, row_splits) for tokens in (key, value))
        scores = tf.einsum("bihd,bjhd->bhij", queries, keys) * queries.shape[-1] ** -0.5
        # Tokens before the queries of a row, <int32>[B]. Padding after a row asks, too, and is dropped.
        before = tf.cast((row_splits - query_splits)[1:] - (row_splits - query_splits)[:-1], tf.int32)
        asking = before[:, tf.newaxis] + tf.range(tf.shape(scores)[2])
        seen = asking[:, tf.newaxis, :, tf.newaxis] >= tf.range(tf.shape(scores)[3])
        weights = self.dropout(tf.nn.softmax(tf.where(seen, scores, scores.dtype.min)), training=training)
        out = jagged.from_dense(tf.einsum("bhij,bjhd->bihd", tf.cast(weights, values.dtype), values), query_splits)
        return tf.cast(tf.reshape(out.values, [-1, query.shape[-1]]), query.dtype)
