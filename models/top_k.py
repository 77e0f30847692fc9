"""The best items of a catalogue for user vectors, in stock operations: all items in blocks, or the lists of an index.

Items are positions in the catalogue. `embed` gives the unit vectors <float>[n, D] of positions <int64>[n]. It reads the
rows of the moment, so a delta changes the scores of both searches.
"""

from __future__ import annotations

from collections.abc import Callable

from tf_fusedrec import tf
from tf_fusedrec.models.item_index import ItemIndex

Embed = Callable[[tf.Tensor], tf.Tensor]
BLOCK = 8192  # items of one product


def seen_positions(catalogue: tf.Tensor, items: tf.Tensor, row_splits: tf.Tensor) -> tf.RaggedTensor:
    """Positions <int64>[B,(n)] in the ascending catalogue of the items <int64>[B,(n)] that it holds."""
    seen = tf.RaggedTensor.from_row_splits(items, row_splits)
    at = tf.minimum(tf.searchsorted(catalogue, seen.values, out_type=tf.int64), tf.size(catalogue, tf.int64) - 1)
    return tf.ragged.boolean_mask(seen.with_values(at), seen.with_values(tf.gather(catalogue, at) == seen.values))


def best_of_all(
    users: tf.Tensor, seen: tf.RaggedTensor, k: tf.Tensor, size: int, embed: Embed
) -> tuple[tf.Tensor, tf.Tensor]:
    """Searches all items, BLOCK at a time, so memory does not grow with the catalogue.

    Args:
      users: <float>[B, D].
      seen: <int64>[B,(n)], positions that get the lowest score.
      k: <int32>[].
      size: Items of the catalogue.
      embed: Vectors of items.

    Returns:
      Positions <int64>[B, k] by descending score, and their scores <float>[B, k].

    Raises:
      InvalidArgumentError: k is negative or larger than the catalogue.
    """
    message = tf.strings.format(f"input k is {{}}, want 0 to {size}, the items of the catalog. Ask for fewer.", k)
    enough = tf.debugging.Assert((k >= 0) & (k <= size), [message])
    rows, lowest = seen.value_rowids(), users.dtype.min

    def step(begin: tf.Tensor, best: tf.Tensor, scores: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        positions = tf.range(begin, tf.minimum(begin + BLOCK, size))
        of_block = tf.matmul(users, embed(positions), transpose_b=True)
        inside = tf.where((seen.values >= begin) & (seen.values < begin + BLOCK))
        pairs = tf.concat([tf.gather(rows, inside), tf.gather(seen.values, inside) - begin], axis=1)
        of_block = tf.tensor_scatter_nd_update(of_block, pairs, tf.fill([tf.shape(pairs)[0]], lowest))
        both = tf.concat([best, tf.tile(positions[tf.newaxis], [tf.shape(users)[0], 1])], axis=1)
        scores, at = tf.math.top_k(tf.concat([scores, of_block], axis=1), k)
        return begin + BLOCK, tf.gather(both, at, batch_dims=1), scores

    with tf.control_dependencies([enough] if enough is not None else []):
        shape = tf.stack([tf.shape(users)[0], k])
    some = tf.TensorShape([None, None])
    _, best, scores = tf.while_loop(
        lambda begin, *_: begin < size,
        step,
        (tf.zeros([], tf.int64), tf.zeros(shape, tf.int64), tf.fill(shape, tf.constant(-float("inf"), users.dtype))),
        shape_invariants=(tf.TensorShape([]), some, some),
        parallel_iterations=1,
    )
    return best, scores


def best_of_lists(
    users: tf.Tensor, seen: tf.RaggedTensor, k: tf.Tensor, index: ItemIndex, embed: Embed
) -> tuple[tf.Tensor, tf.Tensor]:
    """Searches the lists whose centroids are nearest to the user, with at most index.products products per user.

    It has the arguments and results of best_of_all. Where the lists hold fewer than k items, positions are -1.
    """
    centroids, order, splits = (tf.convert_to_tensor(of) for of in (index.centroids, index.order, index.splits))
    ranked = tf.argsort(tf.matmul(users, centroids, transpose_b=True), axis=1, direction="DESCENDING")
    taken = tf.cumsum(tf.gather(splits[1:] - splits[:-1], ranked), axis=1)
    probed = taken <= index.products - index.lists
    # The nearest list is always searched.
    probed = tf.concat([tf.ones_like(probed[:, :1]), probed[:, 1:]], axis=1)

    def of_user(given: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, tf.Tensor]:
        user, lists, chosen, seen_items = given
        lists = tf.boolean_mask(lists, chosen)
        places = tf.ragged.range(tf.gather(splits, lists), tf.gather(splits, lists + 1)).values
        positions = tf.gather(order, places)
        scores = tf.linalg.matvec(embed(positions), user)
        known = tf.concat([tf.sort(seen_items), [tf.int64.max]], axis=0)
        was_seen = tf.gather(known, tf.searchsorted(known, positions)) == positions
        scores = tf.concat([tf.where(was_seen, scores.dtype.min, scores), tf.fill([k], scores.dtype.min)], axis=0)
        best_scores, best = tf.math.top_k(scores, k)
        return tf.gather(tf.concat([positions, tf.fill([k], tf.constant(-1, tf.int64))], axis=0), best), best_scores

    outputs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], users.dtype)
    return tf.map_fn(of_user, (users, ranked, probed, seen), fn_output_signature=outputs)
