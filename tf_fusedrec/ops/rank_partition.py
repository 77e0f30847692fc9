"""Steps 3 and 5 of 7 (docs/concepts.md): sorts unique ids by owner into one message, which the owner reads.

Pure functions of the ids; they know nothing of tables or networks. exchange/routing.py carries the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class RankedIds(NamedTuple):
    """Ids on their way to their owners."""

    message: tf.Tensor  # <int64>[P], blocks [counts[S] | ids] in rank order, padded to a bucketed size
    send_splits: tf.Tensor  # <int32>[R], entries of each owner's block, header included
    id_splits: tf.Tensor  # <int32>[R], ids of each owner's block
    restore: tf.Tensor  # <int32>[U], row of unique id u among the rows that come back


class ReceivedIds(NamedTuple):
    """Ids of all sources at their owner."""

    ids: tf.Tensor  # <int64>[V], grouped by segment; inside a segment by source rank, in the order sent
    segment_splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    position: tf.Tensor  # <int32>[V], index into ids of the v-th id in order of arrival
    id_splits: tf.Tensor  # <int32>[R], ids received from each source


def rank_partition(
    unique_ids: tf.Tensor,
    unique_splits: tf.Tensor,
    *,
    num_ranks: int,
    owner: str = "hash_range",
    id_bits: int = 64,
    segment_names: Sequence[str] = (),
) -> RankedIds:
    """Packs unique ids into one message per owner rank (FusedRec, section 3, "Embedding Route").

    Args:
      unique_ids: <int64>[U], grouped by segment.
      unique_splits: <int64>[S+1], segment bounds inside unique_ids.
      num_ranks: R.
      owner: which rank owns an id: "hash_range" (the range of its 64-bit mix) or "tfra" (TFRA's default
        partition function, on which its files depend).
      id_bits: ids must lie in [0, 2^id_bits); 64 admits every int64.
      segment_names: names of the segments for error messages; empty or one per segment.

    Returns:
      RankedIds. The sort is stable: inside an owner's block, ids keep the order of unique_ids.

    Raises:
      InvalidArgumentError: splits are wrong, or an id does not fit id_bits (the message names its segment).

    Example (R = 2, S = 2, owner = id mod 2):
      unique ids     7 4 3 | 3 8          splits 0 3 5
      message        1 1 4 8 | 2 1 7 3 3  send_splits 4 5, id_splits 2 3
      restore        2 0 3 | 4 1
    """
    return RankedIds(
        *library.fusedrec_rank_partition(
            unique_ids=unique_ids,
            unique_splits=unique_splits,
            num_ranks=num_ranks,
            owner=owner,
            id_bits=id_bits,
            segment_names=list(segment_names),
        )
    )


def unpack_message(message: tf.Tensor, received_splits: tf.Tensor, *, num_segments: int) -> ReceivedIds:
    """Reads the messages of rank_partition at the owner and sorts the ids of all sources by segment.

    Args:
      message: <int64>[V + R * S], blocks in source rank order, not padded.
      received_splits: <int32>[R], entries of each source's block, header included.
      num_segments: S.

    Returns:
      ReceivedIds.

    Raises:
      InvalidArgumentError: a header does not agree with its block; the message names the source rank.
    """
    return ReceivedIds(
        *library.fusedrec_unpack_message(message=message, received_splits=received_splits, num_segments=num_segments)
    )


tf.no_gradient("Fusedrec>RankPartition")
tf.no_gradient("Fusedrec>UnpackMessage")
