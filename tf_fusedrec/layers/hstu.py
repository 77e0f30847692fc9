"""One HSTU block: project, attend, gate, project back, add.

A model is PositionEmbedding (positions.py), then a stack of these. The attention itself is
attention.py; its bias is relative_bias.py.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.attention import jagged_attention
from tf_fusedrec.layers.relative_bias import (
    MAX_TIME_BUCKETS,
    RelativeBias,
    TimeBuckets,
    time_buckets,
)

FORMS = ("research", "mtgrboost")


class HSTU(keras.layers.Layer):
    """Hierarchical sequential transduction unit over ragged sequences.

    form="research", the layer of the public HSTU experiments:
      u, v, q, k = split(SiLU(LN(x) W));   out = x + dropout(u * LN(attention(q, k, v))) W_o + b_o
      LN has no weights, epsilon 1e-6; W has no bias and is drawn from N(0, 0.02).
    form="mtgrboost", equations 1-3 of MTGRBoost:
      u, q, k, v = split(SiLU(x W + b));   out = x + dropout(LN(attention(q, k, v) * u)) W_o + b_o
      LN has weights. The paper's equations show neither the residual x nor a divisor; both are
      added here, as in HSTU.
    attention = sum_j SiLU(q_i k_j + bias_ij) v_j / N with the masks of masks.py: context, causal
    history, targets.

    Args:
      num_heads: H.
      qk_dim, value_dim: columns of one head's query and key, and of its value.
      form: "research" or "mtgrboost".
      max_sequence_length: N >= the longest row; also the divisor of the attention and the size of
        the position bias.
      dropout: before the last projection.
      relative_bias: adds a learned bias by distance in the sequence and in time, one pair of tables
        per block.
      time_buckets: G, the time table has G+1 rows; 0 leaves the time bias out. Ignored without
        relative_bias.

    Call:
      x: RaggedTensor <float>[B,(L),D].
      timestamps: RaggedTensor <int64>[B,(L)] in seconds; or TimeBuckets made of it once for a whole
        stack (`layers.time_buckets`, which also says at what time a token asks). Required when
        there is a time bias.
      num_targets: None or <int>[B], targets at the end of each row.
      contextual_length: C, context tokens at the start of each row.
      returns RaggedTensor <float>[B,(L),D].

    Raises:
      ValueError: an argument out of range, x is not ragged, or timestamps are missing or not
        wanted.
      InvalidArgumentError: a row is longer than max_sequence_length; timestamps have other row
        lengths than x.

    Source: Zhai et al., Actions Speak Louder than Words (ICML 2024); MTGRBoost, section 2.
    """

    def __init__(
        self,
        num_heads: int = 2,
        qk_dim: int = 16,
        value_dim: int = 16,
        form: str = "research",
        max_sequence_length: int = 211,
        dropout: float = 0.0,
        relative_bias: bool = True,
        time_buckets: int = 128,
        **layer_arguments,
    ):
        super().__init__(**layer_arguments)
        sizes = {
            "num_heads": num_heads,
            "qk_dim": qk_dim,
            "value_dim": value_dim,
            "max_sequence_length": max_sequence_length,
        }
        for name, number in sizes.items():
            if number < 1:
                raise ValueError(f"{name} must be >= 1, got {number}.")
        if form not in FORMS:
            raise ValueError(f"form must be one of {FORMS}, got {form!r}.")
        if not 0 <= time_buckets <= MAX_TIME_BUCKETS:
            raise ValueError(f"time_buckets must be 0 (no time bias) .. {MAX_TIME_BUCKETS}, got {time_buckets}.")
        self.num_heads = num_heads
        self.qk_dim = qk_dim
        self.value_dim = value_dim
        self.form = form
        self.max_sequence_length = max_sequence_length
        self.relative_bias = relative_bias
        self.time_buckets = time_buckets
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape):
        columns, inner = input_shape[-1], self.num_heads * self.value_dim
        research = self.form == "research"
        self.projection = keras.layers.Dense(
            2 * self.num_heads * (self.value_dim + self.qk_dim),
            use_bias=not research,
            kernel_initializer=_small_normal() if research else "glorot_uniform",
            activation=tf.nn.silu,
            dtype=self.dtype_policy,
            name="projection",
        )
        self.output_projection = keras.layers.Dense(columns, dtype=self.dtype_policy, name="output_projection")
        self.attention_norm = self._layer_norm(weights=not research, name="attention_norm")
        if research:
            self.input_norm = self._layer_norm(weights=False, name="input_norm")
        if self.relative_bias:
            self.position_weights = self.add_weight(
                "position_weights", [2 * self.max_sequence_length - 1], initializer=_small_normal()
            )
            if self.time_buckets:
                self.time_weights = self.add_weight(
                    "time_weights", [self.time_buckets + 1], initializer=_small_normal()
                )
        for layer, width in (
            (self.projection, columns),
            (self.output_projection, inner),
            (self.attention_norm, inner),
        ):
            with tf.name_scope(layer.name):
                layer.build(tf.TensorShape([None, width]))
        super().build(input_shape)

    def call(self, x, timestamps=None, num_targets=None, contextual_length=0, training=None):
        jagged.check_sequence("x", x)
        x = self._checked_lengths(x)
        bias = self._bias(x, timestamps, num_targets)
        research = self.form == "research"
        projected = self.projection(self.input_norm(x.values) if research else x.values)
        gate, query, key, value = self._split(projected)
        attended = jagged_attention(
            self._heads(query, self.qk_dim),
            self._heads(key, self.qk_dim),
            self._heads(value, self.value_dim),
            x.row_splits,
            scale=1.0 / self.max_sequence_length,
            num_targets=num_targets,
            contextual_length=contextual_length,
            relative_bias=bias,
        )
        attended = tf.reshape(attended, [-1, self.num_heads * self.value_dim])
        gated = gate * self.attention_norm(attended) if research else self.attention_norm(attended * gate)
        return x.with_values(x.values + self.output_projection(self.dropout(gated, training=training)))

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "qk_dim": self.qk_dim,
            "value_dim": self.value_dim,
            "form": self.form,
            "max_sequence_length": self.max_sequence_length,
            "dropout": self.dropout.rate,
            "relative_bias": self.relative_bias,
            "time_buckets": self.time_buckets,
        }

    def _layer_norm(self, weights: bool, name: str) -> keras.layers.Layer:
        return keras.layers.LayerNormalization(
            epsilon=1e-6, center=weights, scale=weights, dtype=self.dtype_policy, name=name
        )

    def _split(self, projected: tf.Tensor) -> list[tf.Tensor]:
        """[T, all] -> gate, query, key, value. Columns lie as in the sources: u v q k; u q k v."""
        qk, value = self.num_heads * self.qk_dim, self.num_heads * self.value_dim
        if self.form == "research":
            gate, value, query, key = tf.split(projected, [value, value, qk, qk], axis=-1)
        else:
            gate, query, key, value = tf.split(projected, [value, qk, qk, value], axis=-1)
        return [gate, query, key, value]

    def _checked_lengths(self, x: tf.RaggedTensor) -> tf.RaggedTensor:
        fits = tf.debugging.assert_less_equal(
            x.row_lengths(),
            tf.constant(self.max_sequence_length, tf.int64),
            message=f"layer {self.name!r}: a row of x is longer than max_sequence_length = "
            f"{self.max_sequence_length}. Trim it with jagged.last.",
        )
        with tf.control_dependencies([] if fits is None else [fits]):
            return x.with_values(tf.identity(x.values))

    def _heads(self, tokens: tf.Tensor, columns: int) -> tf.Tensor:
        return tf.reshape(tokens, [-1, self.num_heads, columns])

    def _bias(self, x, timestamps, num_targets) -> RelativeBias | None:
        wants_times = self.relative_bias and self.time_buckets > 0
        if wants_times and timestamps is None:
            raise ValueError(
                f"layer {self.name!r} has a time bias and needs timestamps, got None. "
                "Pass timestamps=, or build the layer with time_buckets=0."
            )
        if not wants_times and timestamps is not None:
            raise ValueError(
                f"layer {self.name!r} has no time bias, but got timestamps. Leave them out, or "
                "build the layer with relative_bias=True and time_buckets > 0."
            )
        if not self.relative_bias:
            return None
        if not wants_times:
            return RelativeBias(tf.convert_to_tensor(self.position_weights))
        if not isinstance(timestamps, TimeBuckets):
            timestamps = time_buckets(timestamps, self.time_buckets, num_targets=num_targets)
        return RelativeBias(
            tf.convert_to_tensor(self.position_weights),
            tf.convert_to_tensor(self.time_weights),
            timestamps,
        )


def _small_normal() -> keras.initializers.Initializer:
    """A new object per weight: one tf_keras initializer used twice draws the same numbers twice."""
    return keras.initializers.RandomNormal(stddev=0.02)
