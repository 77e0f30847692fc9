"""Step 1 of 7 (docs/concepts.md): joins the ids of a group's features into one flat tensor, a segment per table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library


class FusedIds(NamedTuple):
    """Ids of all features of a group."""

    ids: tf.Tensor  # <int64>[N], features in the order given
    segment_splits: tf.Tensor  # <int64>[S+1], segment bounds inside ids
    bag_splits: tf.Tensor  # <int64>[G+1], ids that are pooled into one row
    bag_scale: tf.Tensor  # <float32>[G], factor of the sum of a bag's rows
    feature_bags: tf.Tensor  # <int64>[F], bags of each feature


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

    Returns:
      FusedIds.

    Raises:
      InvalidArgumentError: row_splits of a feature do not run from 0 to n_f without decreasing. The message names the
        feature.
    """
    ragged = sorted(row_splits)
    return FusedIds(
        *library.fusedrec_fuse_ids(
            ids=list(ids),
            row_splits=[row_splits[f] for f in ragged],
            segments=list(segments),
            num_segments=num_segments,
            ragged_features=ragged,
            feature_names=list(feature_names),
            bag_sizes=list(bag_sizes),
            combiners=list(combiners),
        )
    )


tf.no_gradient("Fusedrec>FuseIds")
