"""Dot products of positions with chosen rows, without the [P, C, D] array of those rows, forward and backward.

Two ways for two sizes of the set of rows: `chosen_products` computes blocks of all products and picks from them, quick
for thousands of rows; `segmented_products` gathers a segment of positions at a time, for any number of rows.
Source of the segments: TurboGR, section 4.3.1, which fetches them from the host; here they are gathered again.
"""

from __future__ import annotations

from collections.abc import Callable

from tf_fusedrec._tf_compat import tf

NORM_FLOOR = 1e-6  # smallest length that L2 normalisation divides by, as in the public HSTU experiments
_BLOCK_ROWS = 512  # of a catalogue of thousands: a few MB, about the cache of a core
_SEGMENT_VALUES = 1 << 18  # values gathered at a time: 1 MiB of float32, likewise


@tf.custom_gradient
def chosen_products(left: tf.Tensor, right: tf.Tensor, chosen: tf.Tensor):
    """left[p] . right[chosen[p, c]]: <float>[P, D], <float>[I, D], <int64>[P, C] -> <float>[P, C]; dense gradients.

    Forward: blocks of left x right stay in the cache while their entries are picked; gathering C rows for every p
    would move D times as much memory. Backward: the gradient is sparse in [P, I], and so are the two products.
    """

    def gradient(upstream):
        weights = _sparse(upstream, chosen, tf.shape(right, tf.int64)[0])
        d_left = tf.raw_ops.SparseTensorDenseMatMul(**weights, b=right)
        return d_left, tf.raw_ops.SparseTensorDenseMatMul(**weights, b=left, adjoint_a=True), None

    def pick(rows: slice) -> tf.Tensor:
        return tf.gather(tf.matmul(left[rows], right, transpose_b=True), chosen[rows], batch_dims=1)

    return tf.ensure_shape(_by_segment(pick, tf.shape(left)[0], _BLOCK_ROWS, left.dtype), chosen.shape), gradient


def segmented_products(left: tf.Tensor, right: tf.Tensor, chosen: tf.Tensor, normalize: bool) -> tf.Tensor:
    """left[p] . r, where r is right[chosen[p, c]], divided by max(its length, 1e-6) if `normalize`.

    Peak memory beside the arguments: one segment, [P, C] numbers, and backward one [U, D], the gradient itself.

    Args:
      left: <float>[P, D], float32 or float64.
      right: <float>[U, D]; 16-bit rows are widened a segment at a time. Their gradient is NOT narrowed: that of a mean
        over thousands of positions lies below the range of float16. Give them straight from an embedding layer.
      chosen: <int>[P, C], rows of `right`.
      normalize: see above.

    Returns:
      <float>[P, C], of left's dtype.
    """
    dtype, width = left.dtype, left.shape[1]
    positions, rows = tf.shape(left)[0], tf.shape(right)[0]
    per_segment = tf.maximum(_SEGMENT_VALUES // tf.maximum(tf.shape(chosen)[1] * width, 1), 1)
    # One number per row, made a block at a time: a whole widened copy of the rows would be the largest array.
    scale = None
    if normalize:
        constant = tf.stop_gradient(right)  # the gradient below accounts for the lengths

        def inverse_lengths(block: slice) -> tf.Tensor:
            return inverse_length(tf.cast(constant[block], dtype))[:, 0]

        scale = _by_segment(inverse_lengths, rows, _SEGMENT_VALUES // width, dtype, element_shape=[None])

    def times_scale(values: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        return values if scale is None else values * tf.gather(scale, of)

    @tf.custom_gradient
    def products(left: tf.Tensor, right: tf.Tensor):
        def segment(of: slice) -> tf.Tensor:
            gathered = tf.cast(tf.gather(right, chosen[of]), dtype)
            return times_scale(tf.linalg.matvec(gathered, left[of]), chosen[of])

        result = _by_segment(segment, positions, per_segment, dtype)

        def gradient(upstream):
            def segment(of: slice) -> tf.Tensor:
                gathered = tf.cast(tf.gather(right, chosen[of]), dtype)
                return tf.linalg.matvec(gathered, times_scale(upstream[of], chosen[of]), transpose_a=True)

            d_left = tf.ensure_shape(_by_segment(segment, positions, per_segment, dtype), left.shape)
            weights = _sparse(times_scale(upstream, chosen), chosen, tf.cast(rows, tf.int64))
            d_right = tf.raw_ops.SparseTensorDenseMatMul(**weights, b=left, adjoint_a=True)
            if scale is None:
                return d_left, d_right
            # Of r / |r|: what points along r is taken off; at the floor the divisor is a constant.
            along = tf.math.unsorted_segment_sum(tf.reshape(upstream * result, [-1]), tf.reshape(chosen, [-1]), rows)
            along = tf.where(scale < 1 / NORM_FLOOR, along * tf.square(scale), 0)
            return d_left, _less_scaled(d_right, along, right)

        return tf.ensure_shape(result, chosen.shape), gradient

    return products(left, right)


def _less_scaled(values: tf.Tensor, scale: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """values[u] - scale[u] * rows[u], <float>[U, D], written over `values`, which nothing else may read.

    A block of rows at a time: neither the product nor the difference is another [U, D]. (A scatter in a loop would
    copy all values for every block: TensorFlow does not see that the loop holds the only reference.)
    """
    total = tf.shape(values)[0]
    per_block = tf.maximum(_SEGMENT_VALUES // tf.maximum(tf.shape(values)[1], 1), 1)

    def step(begin: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + per_block, total)
        change = scale[begin:end, tf.newaxis] * tf.cast(rows[begin:end], values.dtype)
        return end, tf.ensure_shape(tf.raw_ops.InplaceSub(x=values, i=tf.range(begin, end), v=change), values.shape)

    return tf.while_loop(lambda begin, _: begin < total, step, [0, values], parallel_iterations=1)[1]


def widened(vectors: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """vectors as `dtype`, whose gradient is not narrowed again; see segmented_products."""

    @tf.custom_gradient
    def widen(vectors: tf.Tensor):
        return tf.cast(vectors, dtype), lambda upstream: upstream

    return widen(vectors)


def inverse_length(vectors: tf.Tensor) -> tf.Tensor:
    """1 / max(|v|, floor) over the last axis, kept; its gradient at v = 0 is 0."""
    return tf.math.rsqrt(tf.maximum(tf.reduce_sum(tf.square(vectors), axis=-1, keepdims=True), NORM_FLOOR**2))


def _sparse(values: tf.Tensor, chosen: tf.Tensor, rows: tf.Tensor) -> dict[str, tf.Tensor]:
    """The matrix [P, rows] that holds values[p, c] at (p, chosen[p, c]), as SparseTensorDenseMatMul takes it."""
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
    """make(slice of rows) of one segment after another, joined; no segment is kept for a gradient."""
    segments = tf.maximum(-(-rows // per_segment), 1)  # a TensorArray of nothing cannot be joined
    made = tf.TensorArray(dtype, segments, infer_shape=False, element_shape=element_shape)

    def step(number, made):
        return number + 1, made.write(number, make(slice(number * per_segment, (number + 1) * per_segment)))

    _, made = tf.while_loop(lambda number, _: number < segments, step, [0, made], parallel_iterations=1)
    return made.concat()
