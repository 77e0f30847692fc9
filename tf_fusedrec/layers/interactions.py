"""Interactions of dense feature vectors, the top of click models: pairs of them, and crosses of their columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.layers.base import ConfiguredLayer, check_positive


@keras.saving.register_keras_serializable("tf_fusedrec")
class DotInteraction(ConfiguredLayer):
    """The dot products of all pairs of n feature vectors.

    Args:
      self_interaction: True if a vector is also multiplied by itself.

    Call:
      x: list of n tensors <float>[B, D].
      returns <float>[B, n (n - 1) / 2], or [B, n (n + 1) / 2] with self_interaction. Pairs are (1, 0), (2, 0), (2, 1).

    Raises:
      ValueError: the input is no list of at least two vectors.

    Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems,
    arXiv:1906.00091.

    Examples:
      >>> user, item = tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0]])
      >>> fr.layers.DotInteraction()([user, item]).numpy().tolist()
      [[11.0]]
      >>> fr.layers.FeatureCross()(tf.concat([user, item], axis=1)).shape
      TensorShape([1, 4])
    """

    def __init__(self, self_interaction: bool = False, **layer_arguments):
        super().__init__(**layer_arguments)
        self._configure(locals())

    def call(self, x: Sequence[tf.Tensor]) -> tf.Tensor:
        if not isinstance(x, (list, tuple)) or len(x) < 2:
            raise ValueError(
                f"DotInteraction {self.name!r} needs a list of at least two vectors [B, D], got {type(x).__name__}"
                + (f" of {len(x)}." if isinstance(x, (list, tuple)) else ".")
                + " Use tf.unstack(rows, axis=1) for rows [B, n, D]."
            )
        stacked = tf.stack(x, axis=1)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        pairs = np.flatnonzero(np.tri(len(x), k=0 if self.self_interaction else -1))
        return tf.gather(tf.reshape(products, [-1, len(x) ** 2]), pairs, axis=1)


@keras.saving.register_keras_serializable("tf_fusedrec")
class FeatureCross(ConfiguredLayer):
    """A cross layer of DCN-V2: x_0 * (W x + b) + x. L layers make crosses of up to L + 1 columns of x_0.

    Args:
      projection_dim: Rank r of W = U V, with U [n, r] and V [r, n]; None makes W a full matrix [n, n].

    Call:
      x_0: <float>[B, n], input of the first layer.
      x: <float>[B, n], output of the layer before; None: x_0.
      returns <float>[B, n].

    Raises:
      ValueError: projection_dim is below 1.

    Source: Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
    Systems (WWW 2021), equations 1 and 2. DotInteraction has an example.
    """

    def __init__(self, projection_dim: int | None = None, **layer_arguments):
        super().__init__(**layer_arguments)
        if projection_dim is not None:
            check_positive(projection_dim=projection_dim)
        self._configure(locals())

    def build(self, input_shape: tf.TensorShape) -> None:
        rank, columns = self.projection_dim, input_shape[-1]
        self.narrow = keras.layers.Dense(rank, use_bias=False, name="narrow") if rank else None
        self.wide = keras.layers.Dense(columns, name="wide")
        for layer, width in ((self.narrow, columns), (self.wide, rank or columns)):
            if layer is not None:
                with tf.name_scope(layer.name):  # names the weights as a call of the layer does
                    layer.build([None, width])
        super().build(input_shape)

    def call(self, x_0: tf.Tensor, x: tf.Tensor | None = None) -> tf.Tensor:
        x = x_0 if x is None else x
        return x_0 * self.wide(x if self.narrow is None else self.narrow(x)) + x
