"""Step 2 of 7 (docs/concepts.md): removes duplicates inside each segment of a group, in one pass.

Takes the concatenated ids of a group (embedding/groups.py) and returns UniqueIds for rank_partition.py.
"""

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class UniqueIds(NamedTuple):
    """Distinct ids of a fused group."""

    ids: tf.Tensor  # <int64>[U], grouped by segment, in order of first occurrence
    splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    inverse: tf.Tensor  # <int32>[N], ids[inverse[n]] is the n-th input id


def segment_unique(ids: tf.Tensor, segment_splits: tf.Tensor) -> UniqueIds:
    """Removes duplicate ids inside each segment (FusedRec, section 3, "Embedding Deduplication").

    Args:
      ids: <int64>[N]. Any value; negative ids are ordinary ids.
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


tf.no_gradient("Fusedrec>SegmentUnique")
