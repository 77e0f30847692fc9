"""The second half of an HSTU block: normalizes the attention's output, gates it, projects it and adds the input.

The three forms of hstu.py differ in the order and the weights of the normalization. The options match the output stage
of the public operators.
"""

from __future__ import annotations

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.layers.base import ConfiguredLayer, check_choice
from tf_fusedrec.ops import OutputGate

GATE_ACTIVATIONS = {"none": tf.identity, "silu": tf.nn.silu, "sigmoid": tf.sigmoid}


class GatedOutput(ConfiguredLayer):
    """Computes x + W dropout(y), where y is gate * norm(attended) or norm(gate * attended).

    Args:
      num_heads: Number of heads H, for norm "per_head".
      norm: "plain" (layer norm without weights), "affine", or "per_head". "per_head" normalizes the columns of each
        head, with one weight and one bias per head. Epsilon is 1e-6.
      gate_before_norm: True if y is norm(gate * attended), eq. 3 of MTGRBoost.
      gate_activation: Activation of the gate, one of GATE_ACTIVATIONS.
      concat: "none" projects y, "normalized" projects [gate, norm(attended), y], "raw" projects [gate, attended, y].
      use_bias: True if the projection has a bias.
      dropout: Dropout rate of the projection's input.

    Call:
      x: <float>[T, D].
      gate, attended: <float>[T, H * Dv]; or only y, <float>[T, H * Dv], which the op made with `output_gate`.
      returns <float>[T, D].

    Raises:
      ValueError: An option has an unknown value.
    """

    def __init__(
        self,
        num_heads: int = 1,
        norm: str = "plain",
        gate_before_norm: bool = False,
        gate_activation: str = "none",
        concat: str = "none",
        use_bias: bool = True,
        dropout: float = 0.0,
        **layer_arguments,
    ):
        super().__init__(**layer_arguments)
        check_choice("norm", norm, ("plain", "affine", "per_head"))
        check_choice("gate_activation", gate_activation, tuple(GATE_ACTIVATIONS))
        check_choice("concat", concat, ("none", "normalized", "raw"))
        self._configure(locals(), dropout=keras_api.Dropout(dropout, dtype=self.dtype_policy))

    def build(self, input_shape):
        columns, inner = input_shape[0][-1], input_shape[2][-1]
        if self.norm != "plain":
            width = inner if self.norm == "affine" else self.num_heads
            self.norm_weight = self.add_weight(name="norm_weight", shape=[width], initializer="ones")
            self.norm_bias = self.add_weight(name="norm_bias", shape=[width], initializer="zeros")
        self.projection = keras.layers.Dense(
            columns, use_bias=self.use_bias, dtype=self.dtype_policy, name="output_projection"
        )
        with tf.name_scope(self.projection.name):
            self.projection.build((None, inner if self.concat == "none" else 3 * inner))
        super().build(input_shape)

    def call(self, inputs, training=None):
        x, *parts = inputs
        gated = self._gated(*parts) if len(parts) == 2 else parts[0]
        return x + self.projection(self.dropout(gated, training=training))

    def output_gate(self, gate: tf.Tensor) -> OutputGate | None:
        """Returns gate and norm for ops.jagged_attention from gate <float>[T, H * Dv]; None where it lacks a part."""
        if self.concat != "none":  # the projection also takes the attention or its norm
            return None
        columns = gate.shape[-1] // self.num_heads
        by_head = tf.reshape(GATE_ACTIVATIONS[self.gate_activation](gate), [-1, self.num_heads, columns])
        weight, bias = (None, None) if self.norm == "plain" else (self.norm_weight, self.norm_bias)
        if self.norm == "per_head":
            weight, bias = tf.repeat(weight, columns), tf.repeat(bias, columns)
        return OutputGate(by_head, weight, bias, self.norm == "per_head", self.gate_before_norm, jagged.EPSILON)

    def _gated(self, gate: tf.Tensor, attended: tf.Tensor) -> tf.Tensor:
        gate = GATE_ACTIVATIONS[self.gate_activation](gate)
        normalized = self._normalized(attended * gate if self.gate_before_norm else attended)
        gated = normalized if self.gate_before_norm else gate * normalized
        if self.concat != "none":
            middle = normalized if self.concat == "normalized" else attended
            gated = tf.concat([gate, middle, gated], axis=-1)
        return gated

    def _normalized(self, x: tf.Tensor) -> tf.Tensor:
        if self.norm == "plain":
            return jagged.layer_norm(x)
        if self.norm == "affine":
            return jagged.layer_norm(x) * self.norm_weight + self.norm_bias
        heads = tf.reshape(x, [-1, self.num_heads, x.shape[-1] // self.num_heads])
        heads = jagged.layer_norm(heads) * self.norm_weight[:, tf.newaxis] + self.norm_bias[:, tf.newaxis]
        return tf.reshape(heads, [-1, x.shape[-1]])
