"""The mean of a loss that is right on any number of ranks. Models compute values per position, and end with it."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import Place


def global_mean(
    values: tf.Tensor,
    weights: tf.Tensor | None = None,
    *,
    name: str | None = None,
    place: Place | None = None,
    total: tf.Tensor | None = None,
) -> tf.Tensor:
    """R * sum(values * weights) of this rank / sum of the weights of all ranks.

    The AVERAGE over ranks of this number is the weighted mean over all ranks' values. So gradients
    that are averaged over ranks (hvd.DistributedOptimizer, FusedEmbedding(gradient_op="average"))
    are those of the global mean, however uneven the batches are. A mean per rank would weigh a
    value on a rank with few values more than one elsewhere. The number itself, on one rank, is not
    the mean of that rank's values; average it over ranks to report it.

    Args:
      values: <float>[n]. A rank may have n = 0; it must still call, as all ranks must.
      weights: None for 1, or <float>[n], not negative. No gradient flows to them.
      name: of the all-reduce; the same on all ranks, and different for each call in one step. Needed without `total`.
      place: of the FusedEmbedding. Where its groups train apart (Topology rule "weight_sync"), the mean is that of this
        rank's group, and "all ranks" above are its R ranks; dense gradients are then those of the mean of the groups'
        means. None: all ranks.
      total: <float>[], the sum of the weights of all ranks where that is known already, as from `total_weight`: then
        nothing is all-reduced here, between forward and backward pass.

    Returns:
      <float>[], float32 or wider. 0 when the weights of all ranks sum to 0.

    Raises:
      ValueError: the shapes of values and weights are known and differ; neither name nor total is given.

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
            raise ValueError("global_mean needs the name of its all-reduce, or the total weight of all ranks.")
        total = total_weight(tf.reduce_sum(weights), name=name, place=place)
    return tf.math.divide_no_nan(
        tf.cast(_loss_ranks(place).size, values.dtype) * tf.reduce_sum(values * weights),
        tf.stop_gradient(tf.cast(total, values.dtype)),
    )


def total_weight(weight: tf.Tensor, *, name: str, place: Place | None = None) -> tf.Tensor:
    """The sum over the ranks that a loss is the mean of. Where it depends on the batch alone, the sooner the better.

    Args:
      weight: <float>[...] of this rank.
      name, place: see `global_mean`.

    Returns:
      <float>[...].
    """
    return collectives.all_reduce_sum(weight, name=name, ranks=_loss_ranks(place))


def _loss_ranks(place: Place | None) -> collectives.Ranks:
    return collectives.world() if place is None else place.loss_ranks


def at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """float16 and bfloat16 sums over thousands of targets lose whole targets."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
