"""Losses of the two model families, and the mean that is right on any number of ranks.

Models compute per-position values here and end with one `global_mean`. Uses collectives.py for the
sum of weights.
"""

from __future__ import annotations

from tf_fusedrec import collectives
from tf_fusedrec._tf_compat import tf

COLLISION_LOGIT = -5e4  # a negative that is the positive itself; finite, as in the public HSTU experiments
_BLOCK_ROWS = 512  # of a catalogue of thousands: a few MB, about the cache of a core
NORM_FLOOR = 1e-6  # smallest length that L2 normalisation divides by, as there


def global_mean(values: tf.Tensor, weights: tf.Tensor | None = None, *, name: str) -> tf.Tensor:
    """R * sum(values * weights) of this rank / sum of the weights of all ranks.

    The AVERAGE over ranks of this number is the weighted mean over all ranks' values. So gradients
    that are averaged over ranks (hvd.DistributedOptimizer, FusedEmbedding(gradient_op="average"))
    are those of the global mean, however uneven the batches are. A mean per rank would weigh a
    value on a rank with few values more than one elsewhere. The number itself, on one rank, is not
    the mean of that rank's values; average it over ranks to report it.

    Args:
      values: <float>[n]. A rank may have n = 0; it must still call, as all ranks must.
      weights: None for 1, or <float>[n], not negative. No gradient flows to them.
      name: of the all-reduce; the same on all ranks, and different for each call in one step.

    Returns:
      <float>[], float32 or wider. 0 when the weights of all ranks sum to 0.

    Raises:
      ValueError: the shapes of values and weights are known and differ.

    Example, two ranks: values [1, 2, 3] and [7]  ->  2 * 6 / 4 = 3 and 2 * 7 / 4 = 3.5, whose
      average is 13 / 4.

    Source: MTGRBoost, section 5.1, weighted averaging of gradients.
    """
    values = _at_least_float32(values)
    if weights is None:
        weights = tf.ones_like(values)
    weights = tf.stop_gradient(tf.cast(weights, values.dtype))
    if not values.shape.is_compatible_with(weights.shape):
        raise ValueError(f"weights must have the shape of values, {values.shape}, got {weights.shape}.")
    total = collectives.all_reduce_sum(tf.reduce_sum(weights), name=name)
    ranks = tf.cast(collectives.size(), values.dtype)
    return tf.math.divide_no_nan(ranks * tf.reduce_sum(values * weights), tf.stop_gradient(total))


def weighted_binary_cross_entropy(
    labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None = None, *, name: str
) -> tf.Tensor:
    """Global weighted mean of the binary cross entropy of flat targets.

    Args:
      labels: <float>[n], 0 .. 1.
      logits: <float>[n], log odds, before the sigmoid.
      weights: None for 1, or <float>[n]; 0 leaves a target out.
      name: see `global_mean`.

    Returns:
      <float>[], see `global_mean`.

    Raises:
      ValueError: the shapes of labels and logits are known and differ.
    """
    logits = _at_least_float32(logits)
    if not logits.shape.is_compatible_with(labels.shape):
        raise ValueError(
            f"labels must have the shape of logits, {logits.shape}, got {labels.shape}. "
            "Flatten both to one value per target."
        )
    values = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, logits.dtype), logits=logits)
    return global_mean(values, weights, name=name)


def sampled_softmax(
    query: tf.Tensor,
    positive: tf.Tensor,
    negatives: tf.Tensor,
    positive_ids: tf.Tensor,
    negative_ids: tf.Tensor,
    temperature: float,
    normalize: bool = True,
) -> tf.Tensor:
    """-log softmax of the positive among itself and the sampled negatives, per position.

    logit = similarity / temperature; the similarity is the dot product, of L2-normalised vectors if
    `normalize`. A negative whose id equals the position's positive id gets the logit -5e4: it takes
    no part. There is no correction for the sampling distribution.

    Args:
      query: <float>[T, D].
      positive: <float>[T, D], embedding of the item that came next.
      negatives: <float>[T, n, D], own negatives of each position; or <float>[n, D], shared by all
        positions (one [T, D] x [D, n] product, and n rows to look up instead of T * n).
      positive_ids: <int>[T].
      negative_ids: <int>[T, n] or <int>[n], to match negatives.
      temperature: > 0; the public experiments use 0.05 with normalised vectors.
      normalize: divide all vectors by max(their length, 1e-6).

    Returns:
      nll: <float>[T], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: temperature is not positive; negatives is not of rank 2 or 3; negative_ids has
        another rank than negatives without its last axis.

    Source: the public HSTU experiments (Zhai et al., ICML 2024), their sampled softmax loss.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}.")
    if negatives.shape.rank not in (2, 3):
        raise ValueError(f"negatives must be [T, n, D] or [n, D], got shape {negatives.shape}.")
    if negative_ids.shape.rank != negatives.shape.rank - 1:
        raise ValueError(
            f"negative_ids must name every row of negatives {negatives.shape}, got shape {negative_ids.shape}."
        )
    query, positive, negatives = (_at_least_float32(vectors) for vectors in (query, positive, negatives))
    if normalize:
        query, positive = query * _inverse_length(query), positive * _inverse_length(positive)
    similarity = tf.reduce_sum(query * positive, axis=-1, keepdims=True)
    if negatives.shape.rank == 2:
        others = tf.matmul(query, negatives, transpose_b=True)
    else:
        others = tf.linalg.matvec(negatives, query)
    if normalize:
        # Dividing the products avoids a normalised copy of the largest array, negatives.
        others *= tf.squeeze(_inverse_length(negatives), -1)
    collides = tf.cast(negative_ids, tf.int64) == tf.cast(positive_ids, tf.int64)[:, tf.newaxis]
    others = tf.where(collides, tf.constant(COLLISION_LOGIT, others.dtype), others / temperature)
    positive_logit = similarity / temperature
    return tf.reduce_logsumexp(tf.concat([positive_logit, others], axis=1), axis=1) - positive_logit[:, 0]


def sampled_softmax_of_catalogue(
    query: tf.Tensor, items: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, temperature: float
) -> tf.Tensor:
    """`sampled_softmax` of normalised vectors, own negatives, for a catalogue whose rows are all at hand.

    The same value without the [P, n, D] array of negatives: chosen entries of a blocked query x items product, and
    sparse products backward. Quicker where P * n is far more than the items of the catalogue.

    Args:
      query: <float>[P, D].
      items: <float>[I, D], every item of the catalogue.
      positives: <int>[P], the item that came next, as a row of `items`.
      negatives: <int>[P, n], as rows of `items`; one that equals the positive takes no part.
      temperature: > 0.

    Returns:
      nll: <float>[P], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}.")
    query, items = (_at_least_float32(vectors) for vectors in (query, items))
    positives = tf.cast(positives, tf.int64)[:, tf.newaxis]
    negatives = tf.cast(negatives, tf.int64)
    chosen = tf.concat([positives, negatives], axis=1)
    logits = chosen_products(query * _inverse_length(query), items * _inverse_length(items), chosen) / temperature
    others = tf.where(negatives == positives, tf.constant(COLLISION_LOGIT, logits.dtype), logits[:, 1:])
    return tf.reduce_logsumexp(tf.concat([logits[:, :1], others], axis=1), axis=1) - logits[:, 0]


@tf.custom_gradient
def chosen_products(left: tf.Tensor, right: tf.Tensor, chosen: tf.Tensor):
    """left[p] . right[chosen[p, c]]: <float>[P, D], <float>[I, D], <int64>[P, C] -> <float>[P, C]; dense gradients.

    Forward: blocks of left x right stay in the cache while their entries are picked; gathering C rows for every p
    would move D times as much memory. Backward: the gradient is sparse in [P, I], and so are the two products.
    """

    def gradient(upstream):
        shape = tf.shape(chosen, tf.int64)
        rows = tf.repeat(tf.range(shape[0]), shape[1])
        sparse = {
            "a_indices": tf.stack([rows, tf.reshape(chosen, [-1])], axis=1),
            "a_values": tf.reshape(upstream, [-1]),
            "a_shape": tf.stack([shape[0], tf.shape(right, tf.int64)[0]]),
        }
        d_left = tf.raw_ops.SparseTensorDenseMatMul(**sparse, b=right)
        return d_left, tf.raw_ops.SparseTensorDenseMatMul(**sparse, b=left, adjoint_a=True), None

    blocks = tf.maximum(-(-tf.shape(left)[0] // _BLOCK_ROWS), 1)  # a TensorArray of nothing cannot be joined
    picked = tf.TensorArray(left.dtype, blocks, infer_shape=False, element_shape=[None, chosen.shape[1]])

    def pick(block, picked):
        rows = slice(block * _BLOCK_ROWS, (block + 1) * _BLOCK_ROWS)
        products = tf.matmul(left[rows], right, transpose_b=True)
        return block + 1, picked.write(block, tf.gather(products, chosen[rows], batch_dims=1))

    _, picked = tf.while_loop(lambda block, _: block < blocks, pick, [0, picked], parallel_iterations=1)
    return tf.ensure_shape(picked.concat(), chosen.shape), gradient


def _inverse_length(vectors: tf.Tensor) -> tf.Tensor:
    """1 / max(|v|, floor) over the last axis, kept; its gradient at v = 0 is 0."""
    return tf.math.rsqrt(tf.maximum(tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True), NORM_FLOOR**2))


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """float16 and bfloat16 sums over thousands of targets lose whole targets."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
