"""Ids of a group's layers to the ranks that TFRA's partition function names, rows back, gradients out again.

Three all2alls, whatever the number of layers, over all ranks and in the rows' own dtype, as TFRA's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.exchange import collectives


class Route(NamedTuple):
    """How the ids of one lookup travelled: enough to bring rows and to return gradients."""

    name: str  # of the collectives; the same on all ranks
    index: tf.Tensor  # <int32>[N], row of the n-th id among the rows that come back
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    message: tf.Tensor  # <int64>[V + R * S], ids that this rank owns: blocks [counts[S] | ids] by source
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    received_splits: tf.Tensor  # <int32>[R], ids received from each source


def route_ids(unique: ops.UniqueIds, *, name: str, id_bits: int, layers: Sequence[str]) -> Route:
    """Sends ids to their owners under TFRA's default partition function.

    Args:
      unique: ids by segment, with the place of each id asked for.
      name: of the collective, the same on all ranks.
      id_bits: ids must lie in [0, 2^id_bits); 64 admits every int64.
      layers: names of the segments.
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
    """[U, D], in the order of route.index, of the owners' rows [>= V, D] in the order in which ids arrived."""
    return collectives.all_to_all(rows, route.received_splits, name=f"{route.name}.rows")[0]


def return_gradients(route: Route, grads: tf.Tensor) -> tf.Tensor:
    """[V, D], in the order in which ids arrived, of gradients [>= U, D] in the order of bring_rows."""
    return collectives.all_to_all(grads, route.id_splits, name=f"{route.name}.gradients")[0]


def route_by(partitioner: Callable[[tf.Tensor, int], tf.Tensor], unique: tf.Tensor, *, name: str) -> Route:
    """As route_ids for one segment, by a partition function of the user's.

    Args:
      partitioner: (keys, number of ranks) -> <int32>[U] owner ranks.
      unique: <int64>[U] distinct ids, of which the n-th is the n-th id asked for.
      name: of the collective.
    """
    ranks = collectives.size()
    owner = tf.cast(partitioner(unique, ranks), tf.int32)
    wanted = f"partitioner of layer {name!r} must give ranks in [0, {ranks})"
    in_range = tf.debugging.assert_non_negative(tf.minimum(owner, ranks - 1 - owner), message=wanted)
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
