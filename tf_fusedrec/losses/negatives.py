"""Dot products of positions with chosen rows, forward and backward, without the [P, C, D] array of the rows.

`chosen_products` computes blocks of all products and picks from them, which is fast for thousands of rows.
`segmented_products` gathers one segment of positions at a time and suits any number of rows.
Source of the segments: TurboGR, section 4.3.1, which fetches them from the host. The backward pass gathers them again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import SAMPLINGS

NORM_FLOOR = 1e-6  # Smallest divisor of the L2 normalisation, as in the public HSTU experiments.
_BLOCK_ROWS = 512  # A block of products with thousands of rows takes a few MB, about one core's cache.
_SEGMENT_VALUES = 1 << 18  # Values gathered at a time: 1 MiB of float32 fits the same cache.


@tf.custom_gradient
def chosen_products(query: tf.Tensor, items: tf.Tensor, chosen: tf.Tensor):
    """Returns query[p] . items[chosen[p, c]] with dense gradients.

    query <float>[P, D], items <float>[I, D], chosen <int64>[P, C] -> <float>[P, C]. Forward, a block of query x items
    stays in the cache while its entries are picked. Gathering C rows for every p would move D times as much memory.
    Backward, the gradient is sparse in [P, I], and so are the two products.
    """

    def gradient(upstream):
        weights = _sparse(upstream, chosen, tf.shape(items, tf.int64)[0])
        d_query = tf.raw_ops.SparseTensorDenseMatMul(**weights, b=items)
        return d_query, tf.raw_ops.SparseTensorDenseMatMul(**weights, b=query, adjoint_a=True), None

    def pick(rows: slice) -> tf.Tensor:
        return tf.gather(tf.matmul(query[rows], items, transpose_b=True), chosen[rows], batch_dims=1)

    return tf.ensure_shape(_by_segment(pick, tf.shape(query)[0], _BLOCK_ROWS, query.dtype), chosen.shape), gradient


def segmented_products(query: tf.Tensor, items: tf.Tensor, chosen: tf.Tensor, normalize: bool) -> tf.Tensor:
    """Returns query[p] . r with r = items[chosen[p, c]]; with `normalize`, r is divided by max(its length, 1e-6).

    query <float32 or float64>[P, D], items <float>[U, D], chosen <int>[P, C] -> <dtype of query>[P, C]. Beside these,
    peak memory is one segment and, backward, the gradient [U, D]. 16-bit rows are widened a segment at a time. Their
    gradient is NOT narrowed, because a mean over thousands of positions has gradients below float16's range.
    """
    dtype, width = query.dtype, query.shape[1]
    positions, rows = tf.shape(query)[0], tf.shape(items)[0]
    per_segment = tf.maximum(_SEGMENT_VALUES // tf.maximum(tf.shape(chosen)[1] * width, 1), 1)
    # The inverse lengths are computed block by block, because a widened copy of all rows would be the largest array.
    scale = None
    if normalize:
        constant = tf.stop_gradient(items)  # The gradient below accounts for the lengths.

        def inverse_lengths(block: slice) -> tf.Tensor:
            return inverse_length(tf.cast(constant[block], dtype))[:, 0]

        scale = _by_segment(inverse_lengths, rows, _SEGMENT_VALUES // width, dtype, element_shape=[None])

    def times_scale(values: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        return values if scale is None else values * tf.gather(scale, of)

    @tf.custom_gradient
    def products(query: tf.Tensor, items: tf.Tensor):
        def segment(of: slice) -> tf.Tensor:
            gathered = tf.cast(tf.gather(items, chosen[of]), dtype)
            return times_scale(tf.linalg.matvec(gathered, query[of]), chosen[of])

        result = _by_segment(segment, positions, per_segment, dtype)

        def gradient(upstream):
            def segment(of: slice) -> tf.Tensor:
                gathered = tf.cast(tf.gather(items, chosen[of]), dtype)
                return tf.linalg.matvec(gathered, times_scale(upstream[of], chosen[of]), transpose_a=True)

            d_query = tf.ensure_shape(_by_segment(segment, positions, per_segment, dtype), query.shape)
            weights = _sparse(times_scale(upstream, chosen), chosen, tf.cast(rows, tf.int64))
            d_items = tf.raw_ops.SparseTensorDenseMatMul(**weights, b=query, adjoint_a=True)
            if scale is None:
                return d_query, d_items
            # The gradient of r / |r| has no component along r. Below NORM_FLOOR the divisor is constant.
            along = tf.math.unsorted_segment_sum(tf.reshape(upstream * result, [-1]), tf.reshape(chosen, [-1]), rows)
            along = tf.where(scale < 1 / NORM_FLOOR, along * tf.square(scale), 0)
            return d_query, _less_scaled(d_items, along, items)

        return tf.ensure_shape(result, chosen.shape), gradient

    return products(query, items)


def _less_scaled(values: tf.Tensor, scale: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Writes values[u] - scale[u] * rows[u], <float>[U, D], over `values`, which no other op may read.

    The loop works on one block of rows at a time, so neither the product nor the difference needs another [U, D]. A
    scatter would copy all values for every block, because TensorFlow does not see that the loop has the only
    reference.
    """
    total = tf.shape(values)[0]
    per_block = tf.maximum(_SEGMENT_VALUES // tf.maximum(tf.shape(values)[1], 1), 1)

    def step(begin: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + per_block, total)
        change = scale[begin:end, tf.newaxis] * tf.cast(rows[begin:end], values.dtype)
        return end, tf.ensure_shape(tf.raw_ops.InplaceSub(x=values, i=tf.range(begin, end), v=change), values.shape)

    return tf.while_loop(lambda begin, _: begin < total, step, [0, values], parallel_iterations=1)[1]


def widened(vectors: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts vectors to `dtype` without narrowing their gradient; see segmented_products."""

    @tf.custom_gradient
    def widen(vectors: tf.Tensor):
        return tf.cast(vectors, dtype), lambda upstream: upstream

    return widen(vectors)


def inverse_length(vectors: tf.Tensor) -> tf.Tensor:
    """Returns 1 / max(|v|, NORM_FLOOR) over the last axis, kept as size 1. Its gradient at v = 0 is 0."""
    return tf.math.rsqrt(tf.maximum(tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True), NORM_FLOOR**2))


def _sparse(values: tf.Tensor, chosen: tf.Tensor, rows: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns SparseTensorDenseMatMul's arguments for the [P, rows] matrix with values[p, c] at (p, chosen[p, c])."""
    shape = tf.shape(chosen, tf.int64)
    position = tf.repeat(tf.range(shape[0]), shape[1])
    return {
        "a_indices": tf.stack([position, tf.cast(tf.reshape(chosen, [-1]), tf.int64)], axis=1),
        "a_values": tf.reshape(values, [-1]),
        "a_shape": tf.stack([shape[0], rows]),
    }


def _by_segment(
    make: Callable[[slice], tf.Tensor], rows: tf.Tensor, per_segment, dtype: tf.DType, element_shape=(None, None)
) -> tf.Tensor:
    """Calls make(slice of rows) segment by segment and joins the results. No segment is kept for a gradient."""
    segments = tf.maximum(-(-rows // per_segment), 1)  # An empty TensorArray cannot be concatenated.
    results = tf.TensorArray(dtype, segments, infer_shape=False, element_shape=element_shape)

    def step(number, results):
        return number + 1, results.write(number, make(slice(number * per_segment, (number + 1) * per_segment)))

    _, results = tf.while_loop(lambda number, _: number < segments, step, [0, results], parallel_iterations=1)
    return results.concat()


class Sampler:
    """Draws negatives, with replacement.

    "uniform" draws every item of the catalogue with equal probability. "frequency" draws an item by its share of the
    training interactions. "in_batch" draws the positive of a position of this batch, with a row that is already looked
    up.

    Args:
      num_items: I >= 1, number of items in the catalogue. Negatives are indices into it.
      sampling: Distribution of the negatives, one of SAMPLINGS.
      counts: <int>[I], training interactions of each item. "uniform" does not need it. "in_batch" needs it for `log_q`
        only.

    Raises:
      ValueError: `sampling` is unknown, `counts` has another length, or "frequency" has no count above 0.
    """

    def __init__(self, num_items: int, sampling: str = "uniform", counts: np.ndarray | None = None):
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}.")
        if counts is not None and np.shape(counts) != (num_items,):
            raise ValueError(
                f"counts must hold one number for each of {num_items} items, got shape {np.shape(counts)}."
            )
        if sampling == "frequency" and (counts is None or not np.any(counts)):
            raise ValueError("sampling 'frequency' needs counts, some above 0. Use those of the training data.")
        self.sampling = sampling
        self._num_items = num_items
        # Variables keep the counts of a catalogue with millions of items out of the graph.
        self._ends = self._log_q = None
        if counts is not None:
            counts = np.asarray(counts, np.int64)
            if sampling == "frequency":
                self._ends = tf.Variable(np.cumsum(counts), trainable=False)
            # log_q of an item without interactions must be finite: it is never drawn, but it may be a positive.
            self._log_q = tf.Variable(
                np.log(np.maximum(counts, 1) / max(counts.sum(), 1)).astype(np.float32), trainable=False
            )

    def draw(self, shape: tf.Tensor, seed: tf.Tensor, num_positions: tf.Tensor) -> tf.Tensor:
        """Draws negatives <int32>[shape], indices into the catalogue or, for "in_batch", positions of the batch.

        Args:
          shape: <int32>[any], for example [P, n] for n negatives per position.
          seed: <int>[2].
          num_positions: P, <int>[]. Only "in_batch" reads it.
        """
        if self._ends is not None:
            drawn = tf.random.stateless_uniform(shape, seed, maxval=self._ends[-1], dtype=tf.int64)
            indices = tf.searchsorted(self._ends, tf.reshape(drawn, [-1]), side="right", out_type=tf.int32)
            return tf.reshape(indices, shape)
        candidates = tf.maximum(num_positions, 1) if self.sampling == "in_batch" else self._num_items
        return tf.random.stateless_uniform(shape, seed, maxval=tf.cast(candidates, tf.int32), dtype=tf.int32)

    def log_q(self, items: tf.Tensor) -> tf.Tensor:
        """Returns the log probability <float32> of drawing the items with these catalogue indices <int>[...].

        The probability is the item's share of the training interactions. A batch is a sample of them, so it serves
        "in_batch" as well.

        Raises:
          ValueError: The sampler has no counts.
        """
        if self._log_q is None:
            raise ValueError("log_q needs counts. Use Sampler(..., counts=).")
        return tf.gather(self._log_q, items)


def other_positions(num_positions: tf.Tensor, columns: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns other positions of the batch for each position, <int32>[P, columns]. P = 1 gives the position itself.

    The function draws one random cycle through all positions and, for each column, a random number of steps along it.
    Every column has each position exactly once, so all negatives are shared equally often.

    Args:
      num_positions: P, <int32>[].
      columns: Number of other positions for each position.
      seed: <int>[2].
    """
    cycle = tf.random.experimental.stateless_shuffle(tf.range(num_positions), seed)
    steps = tf.random.stateless_uniform([columns], seed + 1, minval=None, maxval=None, dtype=tf.int32)
    steps = 1 + tf.math.floormod(steps, tf.maximum(num_positions - 1, 1))
    reached = tf.math.floormod(tf.math.invert_permutation(cycle)[:, tf.newaxis] + steps, tf.maximum(num_positions, 1))
    return tf.gather(cycle, reached)


def reuse(values: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Returns values[source[p, c], c mod n], the values of other positions, for sharing negatives or logits.

    With rows or ids of negatives, position i gets additional negatives n_k,j of positions k. The loss then computes its
    own logits o_i . n_k,j, as eq. 2 of the source says. With logits, position i gets o_k . n_k,j at no cost, as the
    source's text says. An expansion by k needs m = (k - 1) n, the source's R_aux.

    Args:
      values: [P, n].
      source: <int>[P, m], other positions; see other_positions.

    Returns:
      [P, m].
    """
    column = tf.math.floormod(tf.range(tf.shape(source)[1]), tf.maximum(tf.shape(values)[1], 1))
    column = tf.broadcast_to(column, tf.shape(source))
    return tf.gather_nd(values, tf.stack([tf.cast(source, tf.int32), column], axis=-1))
