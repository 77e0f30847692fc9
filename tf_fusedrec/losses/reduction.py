"""Reduces a loss to a mean that is correct on any number of ranks."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout


def global_mean(
    values: tf.Tensor,
    weights: tf.Tensor | None = None,
    *,
    name: str | None = None,
    layout: RankLayout | None = None,
    total: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns R * (sum of values * weights on this rank) / (sum of the weights on all R ranks).

    The AVERAGE of this number over ranks is the weighted mean over all ranks' values. Gradients that are averaged over
    ranks (hvd.DistributedOptimizer, FusedEmbedding(gradient_op="average")) are therefore gradients of the global mean,
    however uneven the batches are. A mean per rank would give a value more weight on a rank with few values. One
    rank's number is not the mean of its own values; average it over ranks to report it.

    Args:
      values: <float>[n]. A rank with n = 0 must still call, because all ranks take part.
      weights: None for 1, or <float>[n], not negative. No gradient flows to them.
      name: Name of the all-reduce, equal on all ranks and unique among the calls of a step. Needed without `total`.
      layout: FusedEmbedding.layout, or None for all ranks. Under the Topology rule "weight_sync", groups of ranks
        train apart. The mean is then over this rank's group of R ranks, and dense gradients belong to the mean of the
        groups' means.
      total: <float>[], the sum of the weights of all ranks, for example from `total_weight`. It saves the all-reduce
        between the forward and the backward pass.

    Returns:
      <float>[], float32 or wider. 0 when the weights of all ranks sum to 0.

    Raises:
      ValueError: The static shapes of values and weights differ, or both `name` and `total` are missing.

    Example, two ranks: values [1, 2, 3] and [7]  ->  2 * 6 / 4 = 3 and 2 * 7 / 4 = 3.5, whose
      average is 13 / 4.

    Source: MTGRBoost, section 5.1, weighted averaging of gradients.
    """
    values = at_least_float32(values)
    if weights is None:
        weights = tf.ones_like(values)
    weights = tf.stop_gradient(tf.cast(weights, values.dtype))
    if not values.shape.is_compatible_with(weights.shape):
        raise ValueError(f"weights must have the shape of values, {values.shape}, got {weights.shape}.")
    if total is None:
        if name is None:
            raise ValueError("global_mean got neither name nor total. Pass name=, or total= from total_weight.")
        total = total_weight(tf.reduce_sum(weights), name=name, layout=layout)
    return tf.math.divide_no_nan(
        tf.cast(_loss_ranks(layout).size, values.dtype) * tf.reduce_sum(values * weights),
        tf.stop_gradient(tf.cast(total, values.dtype)),
    )


def total_weight(weight: tf.Tensor, *, name: str, layout: RankLayout | None = None) -> tf.Tensor:
    """Sums a weight over the ranks of a loss. Call it before the forward pass if it depends on the batch alone.

    Args:
      weight: <float>[...], this rank's weight.
      name, layout: Arguments of `global_mean`.

    Returns:
      <float>[...].
    """
    return collectives.all_reduce_sum(weight, name=name, ranks=_loss_ranks(layout))


def _loss_ranks(layout: RankLayout | None) -> collectives.Ranks:
    return collectives.world() if layout is None else layout.loss_ranks


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """Widens float16 and bfloat16 to float32, because their sums over thousands of targets lose whole targets."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
