"""FuXi blocks: separate attention channels by meaning, position and time, then a gated feed-forward network.

The blocks use the op of hstu.py. Its `bias_attention` applies the position map and the time map to the values without
SiLU and without a divisor.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import AttentionState, SequenceBlock, check_choice, check_positive
from tf_fusedrec.layers.relative_bias import BiasWeights, check_bias_arguments
from tf_fusedrec.layers.stock_attention import FUSED
from tf_fusedrec.ops import RelativeBias, SequenceTimes

FORMS = ("alpha", "beta")


@keras.saving.register_keras_serializable("tf_fusedrec")
class FuXi(SequenceBlock):
    """FuXi-alpha or FuXi-beta block over ragged sequences.

    With RMS = RMSNorm without weights, epsilon 1e-6:
      u, v, q, k = split(SiLU(RMS(x) W));  channels, per head: position map v, time map v, SiLU(q k) v / N
      h = x + Lin0(dropout(u * RMS(channels)));   g = dropout(RMS(h));   out = h + Lin2(SiLU(Lin1 g) * Lin3 g)
    "alpha" has all three channels. "beta" has the position and time channels only, without q and k. The maps are
    causal and shared by the heads. The block supports neither targets nor context tokens.

    Args:
      num_heads: Number of heads, H.
      qk_dim: Columns of a head's query and key, for form "alpha" only.
      value_dim: Columns of a head's value.
      form: "alpha" or "beta".
      ffn_multiple: Hidden columns of the feed-forward network, in multiples of D. 0 omits it ("single stage").
      max_sequence_length: N, at least the longest row. It is also the divisor of the SiLU channel.
      time_encoding: "buckets" (alpha as published), "power" or "exponential" (beta as published), or "stretched"
        (FuXi-gamma); see BiasWeights.
      time_buckets: J of "buckets".
      dropout: Dropout rate before Lin0 and before the feed-forward network.

    Call:
      x: RaggedTensor <float>[B,(L),D].
      timestamps: RaggedTensor <int64>[B,(L)] in seconds, or SequenceTimes, which a stack computes once.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: An argument is out of range, x is not ragged, or timestamps are missing.
      InvalidArgumentError: A row is longer than max_sequence_length, or the row lengths of timestamps differ from x's.

    Source: Ye et al., FuXi-alpha (2025); FuXi-beta (2025); FuXi-gamma (arXiv 2512.12740) without its block-sparse
    position map.

    Examples:
      >>> x = tf.RaggedTensor.from_row_lengths(tf.ones([5, 8]), [3, 2])
      >>> seconds = tf.RaggedTensor.from_row_lengths(tf.constant([10, 20, 60, 5, 7], tf.int64), [3, 2])
      >>> fr.layers.FuXi(num_heads=2, qk_dim=4, value_dim=4, max_sequence_length=16)(x, seconds).shape
      TensorShape([2, None, 8])
    """

    def __init__(
        self,
        num_heads: int = 2,
        qk_dim: int = 16,
        value_dim: int = 16,
        form: str = "alpha",
        ffn_multiple: int = 1,
        max_sequence_length: int = 211,
        time_encoding: str = "buckets",
        time_buckets: int = 128,
        dropout: float = 0.0,
        **layer_arguments,
    ):
        super().__init__(**layer_arguments)
        check_positive(num_heads=num_heads, qk_dim=qk_dim, value_dim=value_dim)
        check_choice("form", form, FORMS)
        if ffn_multiple < 0:
            raise ValueError(f"ffn_multiple must be >= 0, got {ffn_multiple}. 0 omits the feed-forward network.")
        check_bias_arguments(max_sequence_length, time_encoding, time_buckets)
        if time_encoding == "none":
            raise ValueError(
                'time_encoding must not be "none", because every FuXi block has a time channel. Use "buckets", '
                '"power", "exponential" or "stretched".'
            )
        self._configure(locals(), dropout=keras_api.Dropout(dropout, dtype=self.dtype_policy))
        self.kernels = FUSED  # fr.export replaces it by STOCK while it traces.

    def build(self, input_shape):
        columns, inner = input_shape[-1], self.num_heads * self.value_dim
        hidden = columns * self.ffn_multiple
        self.projection = self._dense(
            sum(self._widths()), tf.nn.silu, "projection", keras.initializers.RandomNormal(stddev=0.02)
        )
        self.bias_weights = BiasWeights(
            self.max_sequence_length, True, self.time_encoding, self.time_buckets, name=f"{self.name}_bias"
        )
        self.channel_projection = self._dense(columns, None, "channel_projection", use_bias=True)
        layers = [
            (self.projection, columns),
            (self.bias_weights, None),
            (self.channel_projection, self._channels() * inner),
        ]
        if hidden:
            self.ffn_gate = self._dense(hidden, tf.nn.silu, "ffn_gate")
            self.ffn_value = self._dense(hidden, None, "ffn_value")
            self.ffn_output = self._dense(columns, None, "ffn_output")
            layers += [(self.ffn_gate, columns), (self.ffn_value, columns), (self.ffn_output, hidden)]
        for layer, width in layers:
            with tf.name_scope(layer.name):
                layer.build(None if width is None else (None, width))
        super().build(input_shape)

    def call(self, x, timestamps=None, training=None):
        x = jagged.checked_lengths(x, self.max_sequence_length, self.name)
        bias = self.bias_weights(x.row_splits, timestamps)
        gate, value, query, key = self._project(x.values)
        return self._finish(x, gate, self._attend(query, key, value, x.row_splits, bias), training)

    def attend(  # type: ignore[override]
        self, x: tf.RaggedTensor, state: AttentionState | None = None, timestamps: SequenceTimes | None = None
    ) -> tuple[tf.RaggedTensor, AttentionState]:
        x = self._cast(x)
        gate, value, query, key = self._project(x.values)
        new, rows, times = self._grown(x, state, value[:, :, :0] if key is None else key, value, timestamps)
        row_splits = rows.values.row_splits
        bias = self.bias_weights(row_splits, times)
        channels = self._attend(query, rows.keys.values, rows.values.values, row_splits, bias, x.row_splits)
        return self._finish(x, gate, channels, False), new

    def _project(self, tokens: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Returns the gate, and by head the values, queries and keys; the last two are None in "beta"."""
        gate, value, *rest = tf.split(self.projection(jagged.rms_norm(tokens)), self._widths(), axis=-1)
        query, key = (self._heads(part, self.qk_dim) for part in rest) if rest else (None, None)
        return gate, self._heads(value, self.value_dim), query, key

    def _attend(self, query, key, value, row_splits, bias: RelativeBias, query_splits=None) -> tf.Tensor:
        """Returns all channels of all heads, <float>[Tq, channels * H * Dv]."""
        channels = self.kernels.bias_attention(value, row_splits, bias=bias, query_splits=query_splits)
        if query is not None:
            scale = 1.0 / self.max_sequence_length
            semantic = self.kernels.attention(query, key, value, row_splits, scale=scale, query_splits=query_splits)
            channels = tf.concat([channels, semantic], axis=-1)
        return tf.reshape(channels, [-1, self._channels() * self.num_heads * self.value_dim])

    def _finish(
        self, x: tf.RaggedTensor, gate: tf.Tensor, channels: tf.Tensor, training: bool | None
    ) -> tf.RaggedTensor:
        gated = self.dropout(gate * jagged.rms_norm(channels), training=training)
        hidden = x.values + self.channel_projection(gated)
        if not self.ffn_multiple:
            return x.with_values(hidden)
        g = self.dropout(jagged.rms_norm(hidden), training=training)
        return x.with_values(hidden + self.ffn_output(self.ffn_gate(g) * self.ffn_value(g)))

    def forward_flops(self, row_splits: tf.Tensor, columns: int) -> tf.Tensor:
        """Counts multiplications and additions of the matrix products, <float64>[], over visible pairs only."""
        inner = self.num_heads * self.value_dim
        per_token = 2 * columns * (sum(self._widths()) + self._channels() * inner + 3 * columns * self.ffn_multiple)
        per_pair = 2 * 2 * inner + (2 * (self.num_heads * self.qk_dim + inner) if self.form == "alpha" else 0)
        return self._flops(row_splits, per_token, per_pair)

    def _channels(self) -> int:
        return 3 if self.form == "alpha" else 2

    def _widths(self) -> list[int]:
        """Returns the column counts of u, v and, in "alpha", q and k."""
        inner, qk = self.num_heads * self.value_dim, self.num_heads * self.qk_dim
        return [self._channels() * inner, inner, *([qk, qk] if self.form == "alpha" else [])]

    def _dense(self, units, activation, name, initializer="glorot_uniform", use_bias=False) -> keras.layers.Dense:
        return keras.layers.Dense(
            units, activation, use_bias, kernel_initializer=initializer, dtype=self.dtype_policy, name=name
        )
