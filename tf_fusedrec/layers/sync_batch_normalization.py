"""Batch normalization over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, tf

_all_reduce: Callable[..., tf.Tensor] = tf.identity  # for one process; the package sets that of all ranks


def reduce_by(all_reduce_sum: Callable[..., tf.Tensor]) -> None:
    """Sets the function of (tensor, name=) that sums over all ranks."""
    global _all_reduce
    _all_reduce = all_reduce_sum


@keras.saving.register_keras_serializable("tf_fusedrec")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization with the moments of the whole batch, the samples of all ranks.

    R ranks compute what one process computes with the whole batch: outputs, gradients and moving statistics, however
    uneven the ranks' batches. A training step makes one all-reduce of the moments forward, and one backward. With one
    process it is keras.layers.BatchNormalization without its fused kernel.

    All ranks call it equally often, with no samples if necessary. Under FrozenWindow and Nested, a batch is the n-th
    micro-batch of all ranks.

    Args:
      **kwargs: As for keras.layers.BatchNormalization, without `fused`, `renorm`, `virtual_batch_size`, `synchronized`.

    Examples:
      >>> fr.layers.SyncBatchNormalization()(tf.constant([[1.0], [3.0]]), training=True).numpy().round(2).tolist()
      [[-1.0], [1.0]]
    """

    def __init__(self, axis: int = -1, **kwargs: Any):
        refused = sorted({"renorm", "virtual_batch_size"} & {name for name, value in kwargs.items() if value})
        if refused:
            raise ValueError(f"SyncBatchNormalization has no {refused}. Use keras.layers.BatchNormalization.")
        super().__init__(axis, **{**kwargs, "synchronized": True})

    def _moments_of_ranks(
        self, x: tf.Tensor, reduction_axes: list[int], keep_dims: bool, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance <dtype of x>[C] of all ranks' samples."""
        weights = tf.ones_like(x) if mask is None else tf.cast(mask, x.dtype)[..., tf.newaxis] * tf.ones_like(x)
        count = tf.reduce_sum(weights, reduction_axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(x * weights, reduction_axes, keepdims=True), count)
        variance = tf.math.divide_no_nan(
            tf.reduce_sum(tf.square(x - mean) * weights, reduction_axes, keepdims=True), count
        )
        # In float64 the difference of squares below loses nothing that float32 has.
        count, mean, variance = (tf.cast(value, tf.float64) for value in (count, mean, variance))
        moments = tf.stack([count, count * mean, count * (variance + tf.square(mean))])
        count, total, squares = tf.unstack(_all_reduce_sum(moments, self.name))
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        if not keep_dims:
            count, mean, variance = (tf.squeeze(value, reduction_axes) for value in (count, mean, variance))
        # A micro-batch may have no samples on any rank. Then the moving statistics stay.
        pairs = ((mean, self.moving_mean), (variance, self.moving_variance))
        return tuple(tf.where(count > 0, tf.cast(value, x.dtype), tf.cast(moving, x.dtype)) for value, moving in pairs)

    # Keras calls one of these methods.
    if KERAS_IS_LEGACY:
        _sync_calculate_mean_and_var = _moments_of_ranks
    else:

        def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
            return self._moments_of_ranks(inputs, self._reduction_axes, keep_dims=False, mask=mask)

    def get_config(self) -> dict[str, Any]:
        return {name: value for name, value in super().get_config().items() if name != "synchronized"}


def _all_reduce_sum(tensor: tf.Tensor, layer: str) -> tf.Tensor:
    """The sum over all ranks. Its gradient is the sum of all ranks' gradients."""
    name = f"{layer}.moments"
    if not tf.executing_eagerly():  # a layer may be called several times in a step
        name = tf.compat.v1.get_default_graph().unique_name(name)

    @tf.custom_gradient
    def reduced(tensor: tf.Tensor):
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return _all_reduce(gradient, name=f"{name}.gradient")

        return _all_reduce(tensor, name=name), backward

    return reduced(tensor)
