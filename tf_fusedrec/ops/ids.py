"""Ops on the ids of a batch: fuse, remove duplicates, route to owners, share among micro-batches, cluster samples.

Pure functions of the ids; they know nothing of tables or networks. exchange/routing.py sends the messages. Ids are any
int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class FusedIds(NamedTuple):
    """Ids of all features of a group."""

    ids: tf.Tensor  # <int64>[N], features in the order of the arguments
    segment_splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    bag_splits: tf.Tensor  # <int64>[G+1], ids that are pooled into one row
    bag_scale: tf.Tensor  # <float32>[G], factor of the sum of a bag's rows
    feature_bags: tf.Tensor  # <int64>[F], bags of each feature


class UniqueIds(NamedTuple):
    """Distinct ids of a fused group."""

    ids: tf.Tensor  # <int64>[U], grouped by segment, in order of first occurrence
    splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    inverse: tf.Tensor  # <int32>[N], ids[inverse[n]] is the n-th input id


class RankedIds(NamedTuple):
    """Ids on their way to their owners."""

    message: tf.Tensor  # <int64>[P], blocks [counts[S] | ids] in rank order, padded to a bucketed size
    send_splits: tf.Tensor  # <int32>[R], entries of each owner's block, header included
    id_splits: tf.Tensor  # <int32>[R], ids of each owner's block
    restore: tf.Tensor  # <int32>[U], row of unique id u among the returned rows


class PartialSums(NamedTuple):
    """Ids on their way to their owners, which answer each segment with rows or with partial sums of bags."""

    message: tf.Tensor  # <int64>[P], send_splits, id_splits: as in RankedIds
    send_splits: tf.Tensor  # <int32>[R]
    id_splits: tf.Tensor  # <int32>[R]
    terms: tf.Tensor  # <int64>[Q], message with the ids of each sum, blocks [words | terms] by owner
    terms_splits: tf.Tensor  # <int32>[R], entries of each block
    sum_splits: tf.Tensor  # <int32>[R], sums that each owner returns; a row is the sum of one id
    index: tf.Tensor  # <int32>[K], numbers of the sums of each bag, in the order of ranks
    sum_bags: tf.Tensor  # <int64>[G+1], bag g is index[sum_bags[g]:sum_bags[g+1]]


class RowSums(NamedTuple):
    """Sums of rows that a lookup returns in place of rows, and that gradients are of: see partial_sum_terms."""

    index: tf.Tensor  # <int32>[T], place of each term among the received ids; empty: rows themselves
    splits: tf.Tensor  # <int64>[M+1], bounds of each sum inside index


class ReceivedIds(NamedTuple):
    """Ids of all sources at their owner."""

    ids: tf.Tensor  # <int64>[V], grouped by segment; inside a segment by source rank, in the order sent
    segment_splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    position: tf.Tensor  # <int32>[V], index into ids of the v-th id in order of arrival
    id_splits: tf.Tensor  # <int32>[R], ids received from each source


class WindowIds(NamedTuple):
    """Distinct ids of all M pieces of a batch, numbered by first occurrence, one piece after another."""

    new: list[tuple[tf.Tensor, tf.Tensor]]  # by piece, ids that no earlier piece has <int64>[n], splits <int64>[S+1]
    numbers: list[tf.Tensor]  # <int32>[u] of each piece, number of each of its distinct ids
    last: tf.Tensor  # <int32>[U], last piece that has the id


class WindowRoute(NamedTuple):
    """The rows that the pieces of the requesting rank read, and the gradients that leave with each piece."""

    rows: list[tf.Tensor]  # <int32>[u], row of each distinct id of a piece among the rows of all pieces up to it
    marks: tf.Tensor  # <int64>[Q], message with the last piece of each id, blocks [count | words] by owner
    marks_splits: tf.Tensor  # <int32>[R], entries of each block
    term_index: list[tf.Tensor]  # <int32>[k], terms of the sums of gradients, by place in all pieces
    term_splits: list[tf.Tensor]  # <int64>[e+1], the sum g is of term_index[term_splits[g]:term_splits[g+1]]
    gradient_splits: list[tf.Tensor]  # <int32>[R], sums that leave with a piece for each owner


class WindowGradients(NamedTuple):
    """The gradients that arrive at the owner with each piece."""

    trained: list[tuple[tf.Tensor, tf.Tensor]]  # message <int64>[e + R * S] of their ids, its splits <int32>[R]
    rows: list[tf.Tensor]  # <int32>[e], place of each id among the ids of all messages


def fuse_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Mapping[int, tf.Tensor],
    *,
    segments: Sequence[int],
    num_segments: int,
    feature_names: Sequence[str],
    bag_sizes: Sequence[int],
    combiners: Sequence[str],
) -> FusedIds:
    """Concatenates the ids of features (FusedRec, section 3, "Embedding Fusion").

    Args:
      ids: F tensors <int64>[n_f].
      row_splits: <int64>[B_f + 1] of each ragged feature, by its index.
      segments: Segment of each feature, non-decreasing.
      num_segments: S.
      feature_names: Names of the features, for error messages.
      bag_sizes: Ids in a bag of each feature. 1 pools nothing. 0 makes each row of row_splits a bag.
      combiners: "sum", "mean" or "sqrtn", one per feature.

    Raises:
      InvalidArgumentError: row_splits of a feature, which the message names, do not run from 0 to n_f.
    """
    ragged = sorted(row_splits)
    return FusedIds(
        *library.fusedrec_fuse_ids(
            ids=list(ids), row_splits=[row_splits[f] for f in ragged], segments=list(segments),
            num_segments=num_segments, ragged_features=ragged, feature_names=list(feature_names),
            bag_sizes=list(bag_sizes), combiners=list(combiners),
        )
    )  # fmt: skip


def segment_unique(ids: tf.Tensor, segment_splits: tf.Tensor) -> UniqueIds:
    """Removes duplicate ids inside each segment (FusedRec, section 3, "Embedding Deduplication").

    Args:
      ids: <int64>[N].
      segment_splits: <int64>[S+1]. Segment s is ids[segment_splits[s]:segment_splits[s+1]].

    Returns:
      UniqueIds. The result is the same for any number of threads.

    Raises:
      InvalidArgumentError: segment_splits does not run from 0 to N without decreasing.

    Example (S = 2):
      ids            7 3 7 | 3 3
      unique ids     7 3   | 3        splits 0 2 3
      inverse        0 1 0 | 2 2
    """
    return UniqueIds(*library.fusedrec_segment_unique(ids=ids, segment_splits=segment_splits))


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
      owner: The rule of ownership: "hash_range" (the range of the id's 64-bit mix) or "tfra" (TFRA's default partition
        function, on which its files depend).
      id_bits: Ids must be in [0, 2^id_bits); 64 admits every int64.
      segment_names: Names of the segments for error messages; empty or one per segment.

    Returns:
      RankedIds. The sort is stable: inside an owner's block, ids keep the order of unique_ids.

    Raises:
      InvalidArgumentError: Splits are wrong, or an id does not fit id_bits (the message names its segment).

    Example (R = 2, S = 2, owner = id mod 2):
      unique ids     7 4 3 | 3 8          splits 0 3 5
      message        1 1 4 8 | 2 1 7 3 3  send_splits 4 5, id_splits 2 3
      restore        2 0 3 | 4 1
    """
    return RankedIds(
        *library.fusedrec_rank_partition(
            unique_ids=unique_ids, unique_splits=unique_splits, num_ranks=num_ranks, owner=owner, id_bits=id_bits,
            segment_names=list(segment_names),
        )
    )  # fmt: skip


def partial_sums(fused: FusedIds, *, num_ranks: int, row_bytes: int) -> PartialSums:
    """Packs ids into one message per owner, which returns the sum of a bag's rows where that is fewer bytes.

    Each segment travels as rows of its U distinct ids, or as at most min(ids, R) sums of each bag of its N ids:

        2 * row_bytes * U   or   2 * row_bytes * sums + 4 * N

    Sums must save a third of the bytes, because the owner then passes over its rows and gradients once more. So ids
    that many bags share travel as rows, and long bags of rare ids as sums. Ranks may decide differently.

    Args:
      fused: The ids by table, each bag inside one segment.
      num_ranks: R. The owner of an id is the range of its 64-bit mix ("hash_range").
      row_bytes: Bytes of a row, and of its gradient, on the network.

    Raises:
      InvalidArgumentError: splits are wrong, or a bag has ids of two segments.

    Example (R = 2, S = 1, owner = id mod 2; the segment travels as sums):
      ids            7 4 3 | 8 4 4 | 5          three bags
      message        2 4 8 | 3 7 3 5            sums: 4, 8+4+4 of rank 0; 7+3, 5 of rank 1
      index          0 2 | 1 | 3                sum_bags 0 2 3 4
    """
    return PartialSums(
        *library.fusedrec_partial_sums(
            ids=fused.ids, segment_splits=fused.segment_splits, bag_splits=fused.bag_splits, num_ranks=num_ranks,
            row_bytes=row_bytes,
        )
    )  # fmt: skip


def partial_sum_terms(
    terms: tf.Tensor, terms_splits: tf.Tensor, received_splits: tf.Tensor, *, num_segments: int
) -> tuple[RowSums, tf.Tensor]:
    """Reads the terms of partial_sums at the owner.

    Args:
      terms: <int64>[Q], blocks of all sources, in rank order.
      terms_splits: <int32>[R], entries of each block.
      received_splits: <int32>[R], entries of each source's block of ids, header included.
      num_segments: S.

    Returns:
      The sums, none where all sources get rows, and the sums or rows of each source <int32>[R].

    Raises:
      InvalidArgumentError: terms do not name ids of their source; the message names its rank.
    """
    index, splits, of_sources = library.fusedrec_partial_sum_terms(
        terms=terms, terms_splits=terms_splits, received_splits=received_splits, num_segments=num_segments
    )
    return RowSums(index, splits), of_sources


def unpack_message(message: tf.Tensor, received_splits: tf.Tensor, *, num_segments: int) -> ReceivedIds:
    """Reads the messages of rank_partition at the owner and sorts the ids of all sources by segment.

    Args:
      message: <int64>[V + R * S], blocks in source rank order, not padded.
      received_splits: <int32>[R], entries of each source's block, header included.
      num_segments: S.

    Raises:
      InvalidArgumentError: A header disagrees with its block; the message names the source rank.
    """
    return ReceivedIds(
        *library.fusedrec_unpack_message(message=message, received_splits=received_splits, num_segments=num_segments)
    )


def join_messages(messages: Sequence[tf.Tensor], splits: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Joins messages for one all-to-all. Each rank's block consists of its blocks of all messages, in their order.

    Args:
      messages: L tensors <int64>[P_i], blocks for each rank as rank_partition makes them. The rest is padding.
      splits: L tensors <int32>[R], entries of each block.

    Returns:
      joined <int64>[P], padded with zeros to a bucketed size, and the entries of each joined block <int32>[R].

    Raises:
      InvalidArgumentError: Numbers of ranks differ, or splits exceed their message, by index.

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
      InvalidArgumentError: A header disagrees with its block. The message names the source rank and the lookup.
    """
    parts, lengths = library.fusedrec_split_messages(
        message=message, splits=splits, num_messages=len(segments), segments=list(segments)
    )
    return parts, lengths


# Rows that several micro-batches (pieces) of a batch share. A row leaves its owner with the first piece that has its
# id. Its gradient, a sum over pieces, leaves the requesting rank with the last one.


def window_unique(pieces: Sequence[UniqueIds]) -> WindowIds:
    """Finds the ids of each piece that no earlier piece has, in the piece's order, and the last piece of each id.

    Args:
      pieces: M results of segment_unique for the same tables.

    Raises:
      InvalidArgumentError: Splits do not bound the ids of their piece, or numbers of segments differ.

    Example, S = 1:
      ids 7 5 | 5 9    ->  new ids 7 5 | 9    numbers 0 1 | 1 2    last 0 1 1
    """
    new_ids, new_splits, numbers, last = library.fusedrec_window_unique(
        ids=[piece.ids for piece in pieces], id_splits=[piece.splits for piece in pieces]
    )
    return WindowIds(list(zip(new_ids, new_splits)), numbers, last)


def window_route(ids: WindowIds, ranked: Sequence[RankedIds], *, num_segments: int) -> WindowRoute:
    """Plans a window on the requesting rank.

    Args:
      ids: The result of window_unique.
      ranked: rank_partition of the new ids of each piece.
      num_segments: S.

    Raises:
      InvalidArgumentError: The arguments do not belong to the same ids; the message names the first wrong entry.
    """
    return WindowRoute(
        *library.fusedrec_window_route(
            messages=[piece.message for piece in ranked], splits=[piece.send_splits for piece in ranked],
            restore=[piece.restore for piece in ranked], numbers=ids.numbers, last=ids.last, num_segments=num_segments,
        )
    )  # fmt: skip


def window_gradients(
    messages: Sequence[tf.Tensor],
    splits: Sequence[tf.Tensor],
    marks: tf.Tensor,
    marks_splits: tf.Tensor,
    *,
    num_segments: int,
) -> WindowGradients:
    """Plans a window on the rank that owns rows.

    Args:
      messages: M messages <int64>[V + R * S] of new ids, blocks [counts[S] | ids] by source.
      splits: M times <int32>[R], entries of each block.
      marks: <int64>[Q], the received marks.
      marks_splits: <int32>[R], entries of each block of marks.
      num_segments: S.

    Raises:
      InvalidArgumentError: Headers or marks disagree with their blocks. The message names the source rank.
    """
    trained, trained_splits, rows = library.fusedrec_window_gradients(
        messages=list(messages), splits=list(splits), marks=marks, marks_splits=marks_splits, num_segments=num_segments
    )
    return WindowGradients(list(zip(trained, trained_splits)), rows)


def cluster_samples(
    ids: Sequence[tf.Tensor], row_splits: Sequence[tf.Tensor], sizes: tf.Tensor, *, tables: Sequence[int]
) -> tf.Tensor:
    """Orders samples so that micro-batches share few ids (NestPipe, section V.C; see custom_ops/cluster_samples).

    Each micro-batch has nearly its share of the ids. The order is the same on every machine.

    Args:
      ids: F tensors <int64>[n_f], sample by sample.
      row_splits: F tensors <int64>[B+1]. Sample b has ids[row_splits[b]:row_splits[b+1]].
      sizes: <int64>[M], samples of each micro-batch, >= 0, with sum B.
      tables: [F] numbers. Equal ids of features with equal numbers mean one row.

    Returns:
      order: <int64>[B], numbers of the samples, micro-batch by micro-batch, ascending within one.

    Raises:
      InvalidArgumentError: row_splits do not describe their ids; features differ in their number of samples; sizes do
        not sum to it; the ids are too many.

    Example, M = 2:
      ids [[1 2] [7 8] [1 2] [7 8]], sizes [2 2]  ->  order 0 2 1 3 or 1 3 0 2
    """
    return library.fusedrec_cluster_samples(
        ids=list(ids), row_splits=list(row_splits), sizes=sizes, tables=list(tables)
    )


for _op in (
    "FuseIds", "SegmentUnique", "RankPartition", "PartialSums", "PartialSumTerms", "UnpackMessage", "JoinMessages",
    "SplitMessages", "WindowUnique", "WindowRoute", "WindowGradients", "ClusterSamples",
):  # fmt: skip
    tf.no_gradient(f"Fusedrec>{_op}")
