"""Stages 4 and 7 of 8: ids travel to their owners, rows come back, gradients go out again. Knows no table.

Three all2alls per group and training step: ids (with the header of counts), rows, gradients. Send buffers are padded
to bucketed sizes by the ops that make them, the splits say what is real (custom_ops/common/bucket.h says why).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec import collectives, ops
from tf_fusedrec._tf_compat import tf


class Route(NamedTuple):
    """How the ids of one batch of one group travelled: enough to bring rows and to return gradients."""

    name: str  # of the collectives; the same on all ranks
    index: tf.Tensor  # <int32>[N], row of the n-th id among the rows that come back: restore[inverse], composed
    num_unique: tf.Tensor  # <int64>[], U
    id_splits: tf.Tensor  # <int32>[R], ids that this rank sent to each owner
    message: tf.Tensor  # <int64>[V + R * S], ids that this rank owns: blocks [counts[S] | ids] by source
    message_splits: tf.Tensor  # <int32>[R], entries of each block
    received_splits: tf.Tensor  # <int32>[R], ids received from each source


def route_ids(unique: ops.UniqueIds, *, name: str, owner: str, id_bits: int, segment_names: Sequence[str]) -> Route:
    """Sends unique ids to their owners.

    Args:
      unique: distinct ids of a group, by segment.
      name: of the collective, the same on all ranks.
      owner, id_bits, segment_names: see ops.rank_partition.

    Returns:
      Route.
    """
    ranked = ops.rank_partition(
        unique.ids,
        unique.splits,
        num_ranks=collectives.size(),
        owner=owner,
        id_bits=id_bits,
        segment_names=segment_names,
    )
    message, splits = collectives.all_to_all(ranked.message, ranked.send_splits, name=f"{name}.ids")
    return Route(
        name=name,
        index=tf.gather(ranked.restore, unique.inverse),
        num_unique=tf.size(ranked.restore, out_type=tf.int64),
        id_splits=ranked.id_splits,
        message=message,
        message_splits=splits,
        received_splits=splits - len(segment_names),
    )


def own_message(ids: tf.Tensor, segment_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What a single process would receive of itself, duplicates and all: it is its own owner.

    Args:
      ids: <int64>[N], grouped by segment.
      segment_splits: <int64>[S+1].

    Returns:
      message <int64>[S + N] and its splits <int32>[1], as in Route.
    """
    message = tf.concat([segment_splits[1:] - segment_splits[:-1], ids], axis=0)
    return message, tf.reshape(tf.size(message), [1])


def bring_rows(route: Route, rows: tf.Tensor) -> tf.Tensor:
    """Sends rows from their owner to the ranks that asked.

    Args:
      route: of the ids.
      rows: [>= V, D] in the order in which the ids arrived; rows behind V are padding.

    Returns:
      [U, D] in the order that route.index refers to.
    """
    received, _ = collectives.all_to_all(rows, route.received_splits, name=f"{route.name}.rows")
    return received


def return_gradients(route: Route, grads: tf.Tensor) -> tf.Tensor:
    """Sends gradients of rows to their owner: the mirror of bring_rows.

    Args:
      route: of the ids.
      grads: [>= U, D] in the order of bring_rows' result; rows behind U are padding.

    Returns:
      [V, D] in the order in which the ids arrived.
    """
    received, _ = collectives.all_to_all(grads, route.id_splits, name=f"{route.name}.gradients")
    return received
