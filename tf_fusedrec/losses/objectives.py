"""Losses of the two model families, per position. reduction.global_mean reduces them to one number."""

from __future__ import annotations

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.losses.negatives import chosen_products, inverse_length, reuse, segmented_products, widened

COLLISION_LOGIT = -5e4  # Logit of a negative that equals the positive. Finite, as in the public HSTU experiments.


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
    """Returns -log softmax of the positive among itself and the sampled negatives, per position.

    A logit is similarity / temperature. The similarity is the dot product, of L2-normalised vectors if `normalize`. A
    negative with the position's positive id gets the logit -5e4, which excludes it. The [T, n, D] array of
    every position's negatives is never materialised.

    Args:
      query: <float>[T, D].
      positive: <float>[T, D], embeddings of the next items.
      negatives: <float>[U, D], rows of candidate negatives. 16-bit rows are widened a segment at a time.
      positive_ids: <int>[T].
      negative_ids: <int>[U], ids of the rows of `negatives`.
      temperature: Divisor of the similarities, > 0. The public experiments use 0.05 with normalised vectors.
      chosen: <int>[T, n], the negatives of each position as rows of `negatives`. None means all U rows for every
        position, by one [T, D] x [D, U] product.
      normalize: True to divide every vector by max(its length, 1e-6).
      log_q: None, or log sampling probabilities of the positives <float>[T] and of the rows of negatives <float>[U],
        up to one constant. They are subtracted from all logits (logQ correction: Yi et al., RecSys 2019).
      reused_from: None, or <int>[T, m], other positions whose negative logits a position reuses; see
        negatives.reuse. Needs `chosen`.

    Returns:
      nll: <float>[T], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: `temperature` is not positive, `negatives` is not of rank 2, `negative_ids` is not of rank 1, or
        `reused_from` lacks `chosen`.

    Source: the sampled softmax loss of the public HSTU experiments (Zhai et al., ICML 2024); TurboGR, section 4.3.

    Examples:
      >>> items = tf.random.stateless_normal([100, 8], [1, 2])
      >>> drawn = fr.losses.Sampler(num_items=100).draw([16], seed=[3, 4], num_positions=5)
      >>> query, next_items = tf.ones([5, 8]), tf.range(5)
      >>> nll = fr.losses.sampled_softmax(
      ...     query, tf.gather(items, next_items), tf.gather(items, drawn), next_items, drawn, temperature=0.05
      ... )
      >>> loss = fr.losses.global_mean(nll, name="loss")
    """
    _check_temperature(temperature)
    negatives, negative_ids = tf.convert_to_tensor(negatives), tf.convert_to_tensor(negative_ids)
    if negatives.shape.rank != 2 or negative_ids.shape.rank != 1:
        raise ValueError(
            f"negatives must be [U, D] and negative_ids [U], got {negatives.shape} and {negative_ids.shape}. "
            "Pass each position's negatives as rows by `chosen`."
        )
    if reused_from is not None and chosen is None:
        raise ValueError(
            "reused_from needs chosen, got None: every position has all negatives already. Omit reused_from, or pass "
            "chosen."
        )
    query, positive = at_least_float32(query), at_least_float32(positive)
    if normalize:
        query, positive = query * inverse_length(query), positive * inverse_length(positive)
    positive_logit = tf.reduce_sum(query * positive, axis=-1, keepdims=True)
    if chosen is not None:
        negative_logits = segmented_products(query, negatives, chosen, normalize)
    else:
        negatives = widened(negatives, query.dtype)
        negative_logits = tf.matmul(
            query, negatives * inverse_length(negatives) if normalize else negatives, transpose_b=True
        )

    def of_negatives(values: tf.Tensor) -> tf.Tensor:
        return values[tf.newaxis] if chosen is None else tf.gather(values, chosen)

    positive_logit, negative_logits = positive_logit / temperature, negative_logits / temperature
    if log_q is not None:
        positive_logit -= tf.cast(log_q[0], positive_logit.dtype)[:, tf.newaxis]
        negative_logits -= tf.cast(of_negatives(log_q[1]), positive_logit.dtype)
    return _nll(
        positive_logit,
        negative_logits,
        tf.cast(positive_ids, tf.int64),
        tf.cast(of_negatives(negative_ids), tf.int64),
        reused_from,
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
    """Computes `sampled_softmax` of normalised vectors when all rows of the catalogue are in memory.

    It picks entries of a blocked query x items product and uses sparse products backward. It is faster where P * n is
    much larger than the catalogue.

    Args:
      query: <float>[P, D].
      items: <float>[I, D], every item of the catalogue.
      positives: <int>[P], the next items as rows of `items`.
      negatives: <int>[P, n], each position's own negatives as rows of `items`. One that equals the positive is
        excluded.
      temperature: Divisor of the similarities, > 0.
      log_q: None, or <float>[I], log sampling probabilities of the items; see sampled_softmax.
      reused_from: None, or <int>[P, m]; see sampled_softmax.

    Returns:
      nll: <float>[P], float32 or wider. Reduce it with `global_mean`.

    Raises:
      ValueError: `temperature` is not positive.
    """
    _check_temperature(temperature)
    query, items = (at_least_float32(vectors) for vectors in (query, items))
    positives, negatives = tf.cast(positives, tf.int64), tf.cast(negatives, tf.int64)
    chosen = tf.concat([positives[:, tf.newaxis], negatives], axis=1)
    logits = chosen_products(query * inverse_length(query), items * inverse_length(items), chosen) / temperature
    if log_q is not None:
        logits -= tf.cast(tf.gather(log_q, chosen), logits.dtype)
    return _nll(logits[:, :1], logits[:, 1:], positives, negatives, reused_from)


def _nll(
    positive: tf.Tensor, logits: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, reused_from: tf.Tensor | None
) -> tf.Tensor:
    """Returns -log softmax of positive <float>[T, 1] among itself and logits <float>[T, n] of negatives.

    positives <int64>[T] and negatives <int64>[T, n] or [1, n] are the ids.
    """
    collision = tf.constant(COLLISION_LOGIT, logits.dtype)
    logits = tf.where(negatives == positives[:, tf.newaxis], collision, logits)
    if reused_from is not None:
        # A reused logit keeps its collision. It also collides when it is this position's positive.
        more = reuse(logits, reused_from)
        out = reuse(negatives, reused_from) == positives[:, tf.newaxis]
        out |= reused_from == tf.range(tf.shape(reused_from)[0], dtype=reused_from.dtype)[:, tf.newaxis]
        logits = tf.concat([logits, tf.where(out, collision, more)], axis=1)
    return tf.reduce_logsumexp(tf.concat([positive, logits], axis=1), axis=1) - positive[:, 0]


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}.")


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
    rank's number is not the mean of its values; average it over ranks to report it.

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

    Example, two ranks: values [1, 2, 3] and [7]  ->  2 * 6 / 4 = 3 and 2 * 7 / 4 = 3.5, with
      the average 13 / 4.

    Examples:
      >>> labels, logits = tf.constant([1.0, 0.0]), tf.constant([2.0, -1.0])
      >>> values = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
      >>> round(float(fr.losses.global_mean(values, tf.constant([1.0, 3.0]), name="click")), 3)
      0.267

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
    """Sums a weight over the ranks of a loss. Call it before the forward pass if it depends on the batch only.

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
