"""Group layer norm: each kind of token is normalised by weights of its own, because the kinds differ in scale.

Source: MTGR (Han et al., 2025), "group layer normalization" of user, sequence and candidate tokens before each block.
"""

from __future__ import annotations

from typing import Any

from tf_fusedrec import keras, tf
from tf_fusedrec.layers import jagged


class GroupLayerNorm(keras.layers.Layer):
    """Normalises each token over its columns, with a weight and a bias for each kind of token.

    Args:
      kinds: Number of kinds, K.

    Call:
      x: <float>[T, D].
      kind: <int>[T], 0 .. K-1.
      returns <float>[T, D].
    """

    def __init__(self, kinds: int, **layer_arguments: Any):
        super().__init__(**layer_arguments)
        self.kinds = kinds

    def build(self, input_shape: tf.TensorShape) -> None:
        self.weight = self.add_weight(name="weight", shape=[self.kinds, input_shape[-1]], initializer="ones")
        self.bias = self.add_weight(name="bias", shape=[self.kinds, input_shape[-1]], initializer="zeros")
        super().build(input_shape)

    def call(self, x: tf.Tensor, kind: tf.Tensor) -> tf.Tensor:
        return jagged.layer_norm(x) * tf.gather(self.weight, kind) + tf.gather(self.bias, kind)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kinds": self.kinds}
