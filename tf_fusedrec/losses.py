"""Losses of the two model families, and the mean that is right on any number of ranks.

Models compute per-position values here and end with one `global_mean`. Uses collectives.py for the
sum of weights.
"""

from __future__ import annotations

from tf_fusedrec import collectives
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.negatives import reuse
from tf_fusedrec.similarities import chosen_products, inverse_length, segmented_products, widened
from tf_fusedrec.topology import Place

COLLISION_LOGIT = -5e4  # a negative that is the positive itself; finite, as in the public HSTU experiments


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
    values = _at_least_float32(values)
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


def weighted_binary_cross_entropy(
    labels: tf.Tensor,
    logits: tf.Tensor,
    weights: tf.Tensor | None = None,
    *,
    name: str,
    place: Place | None = None,
) -> tf.Tensor:
    """Global weighted mean of the binary cross entropy of flat targets.

    Args:
      labels: <float>[n], 0 .. 1.
      logits: <float>[n], log odds, before the sigmoid.
      weights: None for 1, or <float>[n]; 0 leaves a target out.
      name, place: see `global_mean`.

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
    return global_mean(values, weights, name=name, place=place)


def sampled_softmax(
    query: tf.Tensor,
    positive: tf.Tensor,
    negatives: tf.Tensor,
    positive_ids: tf.Tensor,
    negative_ids: tf.Tensor,
    temperature: float,
    *,
    chosen: tf.Tensor | None = None,
    normalize: bool = True,
    log_q: tuple[tf.Tensor, tf.Tensor] | None = None,
    reused_from: tf.Tensor | None = None,
) -> tf.Tensor:
    """-log softmax of the positive among itself and the sampled negatives, per position.

    logit = similarity / temperature; the similarity is the dot product, of L2-normalised vectors if
    `normalize`. A negative whose id equals the position's positive id gets the logit -5e4: it takes
    no part. The [T, n, D] array of every position's negatives is never made.

    Args:
      query: <float>[T, D].
      positive: <float>[T, D], embedding of the item that came next.
      negatives: <float>[U, D], rows that may be negatives; 16-bit rows are widened a segment at a time.
      positive_ids: <int>[T].
      negative_ids: <int>[U], one for each row of negatives.
      temperature: > 0; the public experiments use 0.05 with normalised vectors.
      chosen: <int>[T, n], the negatives of each position as rows of `negatives`; or None: all U for every
        position (one [T, D] x [D, U] product).
      normalize: divide all vectors by max(their length, 1e-6).
      log_q: None, or log sampling probabilities of positives <float>[T] and of rows of negatives <float>[U], up to
        one constant: they are subtracted from the logits, of positives too (logQ correction: Yi et al., RecSys 2019).
      reused_from: None, or <int>[T, m], other positions, whose negative logits this one reuses: see
        negatives.reuse. Needs `chosen`.

    Returns:
      nll: <float>[T], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: temperature is not positive; negatives is not of rank 2, or negative_ids not of rank 1; reused_from
        without chosen.

    Source: the public HSTU experiments (Zhai et al., ICML 2024), their sampled softmax loss; TurboGR, section 4.3.
    """
    _check_temperature(temperature)
    if negatives.shape.rank != 2 or negative_ids.shape.rank != 1:
        raise ValueError(
            f"negatives must be [U, D] and negative_ids [U], got {negatives.shape} and {negative_ids.shape}. "
            "Say with `chosen` which rows are the negatives of which position."
        )
    if reused_from is not None and chosen is None:
        raise ValueError("reused_from needs chosen: without it every position has all negatives already.")
    query, positive = _at_least_float32(query), _at_least_float32(positive)
    if normalize:
        query, positive = query * inverse_length(query), positive * inverse_length(positive)
    own = tf.reduce_sum(query * positive, axis=-1, keepdims=True)
    if chosen is not None:
        others = segmented_products(query, negatives, chosen, normalize)
    else:
        negatives = widened(negatives, query.dtype)
        others = tf.matmul(query, negatives * inverse_length(negatives) if normalize else negatives, transpose_b=True)

    def of_negatives(values: tf.Tensor) -> tf.Tensor:
        return values[tf.newaxis] if chosen is None else tf.gather(values, chosen)

    own, others = own / temperature, others / temperature
    if log_q is not None:
        own -= tf.cast(log_q[0], own.dtype)[:, tf.newaxis]
        others -= tf.cast(of_negatives(log_q[1]), own.dtype)
    return _nll(
        own, others, tf.cast(positive_ids, tf.int64), tf.cast(of_negatives(negative_ids), tf.int64), reused_from
    )


def sampled_softmax_of_catalogue(
    query: tf.Tensor,
    items: tf.Tensor,
    positives: tf.Tensor,
    negatives: tf.Tensor,
    temperature: float,
    *,
    log_q: tf.Tensor | None = None,
    reused_from: tf.Tensor | None = None,
) -> tf.Tensor:
    """`sampled_softmax` of normalised vectors, own negatives, for a catalogue whose rows are all at hand.

    The same value from chosen entries of a blocked query x items product, and sparse products backward. Quicker where
    P * n is far more than the items of the catalogue.

    Args:
      query: <float>[P, D].
      items: <float>[I, D], every item of the catalogue.
      positives: <int>[P], the item that came next, as a row of `items`.
      negatives: <int>[P, n], as rows of `items`; one that equals the positive takes no part.
      temperature: > 0.
      log_q: None, or <float>[I], of every item; see sampled_softmax.
      reused_from: None, or <int>[P, m]; see sampled_softmax.

    Returns:
      nll: <float>[P], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: temperature is not positive.
    """
    _check_temperature(temperature)
    query, items = (_at_least_float32(vectors) for vectors in (query, items))
    positives, negatives = tf.cast(positives, tf.int64), tf.cast(negatives, tf.int64)
    chosen = tf.concat([positives[:, tf.newaxis], negatives], axis=1)
    logits = chosen_products(query * inverse_length(query), items * inverse_length(items), chosen) / temperature
    if log_q is not None:
        logits -= tf.cast(tf.gather(log_q, chosen), logits.dtype)
    return _nll(logits[:, :1], logits[:, 1:], positives, negatives, reused_from)


def _nll(
    own: tf.Tensor, others: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, reused_from: tf.Tensor | None
) -> tf.Tensor:
    """-log softmax of own <float>[T, 1] among itself and others <float>[T, n]; ids <int64>[T] and [T, n] or [1, n]."""
    collision = tf.constant(COLLISION_LOGIT, others.dtype)
    others = tf.where(negatives == positives[:, tf.newaxis], collision, others)
    if reused_from is not None:
        # What collided over there takes no part here either, nor does what is the positive here.
        more = reuse(others, reused_from)
        out = reuse(negatives, reused_from) == positives[:, tf.newaxis]
        out |= reused_from == tf.range(tf.shape(reused_from)[0], dtype=reused_from.dtype)[:, tf.newaxis]
        others = tf.concat([others, tf.where(out, collision, more)], axis=1)
    return tf.reduce_logsumexp(tf.concat([own, others], axis=1), axis=1) - own[:, 0]


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}.")


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    """float16 and bfloat16 sums over thousands of targets lose whole targets."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
