"""Joins the messages of several lookups for one all-to-all, and splits the received message again."""

from __future__ import annotations

from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


def join_messages(messages: Sequence[tf.Tensor], splits: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins messages. Each rank's block holds its blocks of all messages, in their order.

    Args:
      messages: L tensors <int64>[P_i], blocks for each rank as rank_partition makes them. Entries behind the last block
        are padding.
      splits: L tensors <int32>[R], entries of each block.

    Returns:
      joined <int64>[P], padded with zeros to a bucketed size, and the entries of each joined block <int32>[R].

    Raises:
      InvalidArgumentError: messages for other numbers of ranks; splits that do not lie in their message, by index.

    Example, R = 2, one table per lookup:
      messages  1 7 | 2 5 9     2 4 4 | 0
      joined    1 7 2 4 4 | 2 5 9 0        splits 5 4
    """
    return library.fusedrec_join_messages(messages=list(messages), splits=list(splits))


def split_messages(
    message: tf.Tensor, splits: tf.Tensor, *, segments: Sequence[int]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Splits a received message into the messages that `join_messages` joined. Headers give the lengths of blocks.

    Args:
      message: <int64>[P], joined blocks of all sources, in rank order, not padded.
      splits: <int32>[R], entries of each source's block.
      segments: [L] tables of each lookup, S_i >= 1.

    Returns:
      L messages <int64>[V_i + R * S_i], not padded, and the entries of each of their blocks, L times <int32>[R].

    Raises:
      InvalidArgumentError: a header does not agree with its block. The message names the source rank and the lookup.
    """
    parts, lengths = library.fusedrec_split_messages(
        message=message, splits=splits, num_messages=len(segments), segments=list(segments)
    )
    return parts, lengths


tf.no_gradient("Fusedrec>JoinMessages")
tf.no_gradient("Fusedrec>SplitMessages")
