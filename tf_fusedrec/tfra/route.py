"""Sends a group's ids to the owners of TFRA's partition function, brings rows back and returns gradients.

A group of any number of layers takes three all-to-alls. They span all ranks and keep the rows' dtype, as in TFRA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives


class Route(NamedTuple):
    """The route of one lookup's ids, by which rows come back and gradients go out."""

    name: str  # Prefix of the collectives' names, the same on all ranks.
    index: tf.Tensor  # <int32>[N], index of the n-th id's row among the returned rows.
    num_unique: tf.Tensor  # <int64>[], U.
    id_splits: tf.Tensor  # <int32>[R], number of ids sent to each owner.
    message: tf.Tensor  # <int64>[V + R * S], received ids as blocks [counts[S] | ids] by source rank.
    message_splits: tf.Tensor  # <int32>[R], entries of each block.
    received_splits: tf.Tensor  # <int32>[R], number of ids received from each source rank.


def route_ids(unique: ops.UniqueIds, *, name: str, id_bits: int, layers: Sequence[str]) -> Route:
    """Sends ids to their owners under TFRA's default partition function.

    Args:
      unique: Distinct ids by segment, with the inverse index of the requested ids.
      name: Prefix of the collective's name, the same on all ranks.
      id_bits: Number of id bits: ids must lie in [0, 2^id_bits). 64 admits every int64.
      layers: Names of the segments.
    """
    ranked = ops.rank_partition(
        unique.ids, unique.splits, num_ranks=collectives.size(), owner="tfra", id_bits=id_bits, segment_names=layers
    )
    message, splits = collectives.all_to_all(ranked.message, ranked.send_splits, name=f"{name}.ids")
    return Route(
        name=name, index=tf.gather(ranked.restore, unique.inverse),
        num_unique=tf.size(ranked.restore, out_type=tf.int64), id_splits=ranked.id_splits,
        message=message, message_splits=splits, received_splits=splits - len(layers),
    )  # fmt: skip


def bring_rows(route: Route, rows: tf.Tensor) -> tf.Tensor:
    """Sends rows [>= V, D], in the order of the received ids, to their requesters; returns [U, D] for route.index."""
    return collectives.all_to_all(rows, route.received_splits, name=f"{route.name}.rows")[0]


def return_gradients(route: Route, grads: tf.Tensor) -> tf.Tensor:
    """Sends gradients [>= U, D], in the order of bring_rows, to the owners; returns [V, D] by received id."""
    return collectives.all_to_all(grads, route.id_splits, name=f"{route.name}.gradients")[0]


def route_by(partitioner: Callable[[tf.Tensor, int], tf.Tensor], unique: tf.Tensor, *, name: str) -> Route:
    """Sends the ids of one segment to the owners that a user's partition function names.

    Args:
      partitioner: Function (keys, number of ranks) -> <int32>[U] owner ranks.
      unique: <int64>[U], distinct ids. The route's index n is the position in this tensor.
      name: Prefix of the collective's name.
    """
    ranks = collectives.size()
    owner = tf.cast(partitioner(unique, ranks), tf.int32)
    requirement = f"partitioner of layer {name!r} must give ranks in [0, {ranks})"
    in_range = tf.debugging.assert_non_negative(tf.minimum(owner, ranks - 1 - owner), message=requirement)
    with tf.control_dependencies([] if in_range is None else [in_range]):
        order = tf.argsort(owner, stable=True)
    counts = tf.math.bincount(owner, minlength=ranks, maxlength=ranks)
    blocks = tf.RaggedTensor.from_row_lengths(tf.gather(unique, order), counts, validate=False)
    headers = tf.cast(counts, tf.int64)[:, tf.newaxis]
    message, splits = collectives.all_to_all(
        tf.concat([headers, blocks], axis=1).flat_values, counts + 1, name=f"{name}.ids"
    )
    return Route(
        name=name, index=tf.math.invert_permutation(order), num_unique=tf.size(unique, out_type=tf.int64),
        id_splits=counts, message=message, message_splits=splits, received_splits=splits - 1,
    )  # fmt: skip
