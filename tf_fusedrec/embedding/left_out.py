"""Counts the rows that an update leaves unchanged, because their gradients are not finite, and logs the first ones.

One NaN label would make every row of its sample NaN, and all rows a few steps later. So the update leaves such rows and
their slots unchanged and returns their places (ops.table_apply_gradients). Only then the owner of a row searches for
the rank that sent the gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np

from tf_fusedrec._tf_compat import tf

_LOG = logging.getLogger("tf_fusedrec.tables")


class LeftOut:
    """Counts and names the left out rows of one group of tables.

    Args:
      counts: Number of left out rows by table, shared with the table's statistics.
      features: Names of the features by table, in the order of segments.
      sources: Names of the senders of a message's blocks, such as "rank 0" or "the sum over groups".
    """

    def __init__(self, counts: MutableMapping[str, int], features: Mapping[str, Sequence[str]], sources: Sequence[str]):
        self._counts, self._features, self._sources = counts, features, sources
        self._told: set[str] = set()

    def note(self, *arguments: tf.Tensor) -> tf.Operation | None:
        """Adds the left out rows of one update. Not collective.

        Args:
          arguments: The lookup's message <int64>[V + R * S], splits <int32>[R] and inverse <int32>[V], see
            ops.table_lookup; its gradients [>= V, D] in the order received; the left out rows <int32>[k], numbers as
            in `inverse`; the number of the update, <int64>[].
        """
        return tf.numpy_function(self._tell, arguments, [], stateful=True)

    def _tell(self, *arguments: np.ndarray) -> None:
        message, splits, inverse, grads, left_out, update = arguments
        tables = list(self._features)
        ids, segments, sources = _received(message, splits, len(tables))
        places = np.flatnonzero(np.isin(inverse, left_out))
        numbers, first = np.unique(inverse[places], return_index=True)
        of_table = segments[places[first]]
        for segment, table in enumerate(tables):
            mine = numbers[of_table == segment]
            self._counts[table] = self._counts.get(table, 0) + len(mine)
            if len(mine) == 0 or table in self._told:
                continue
            self._told.add(table)
            of_row = np.flatnonzero(inverse == mine[0])
            bad = of_row[~np.isfinite(grads[of_row].astype(np.float32)).all(axis=1)]
            source = self._sources[sources[bad[0]]] if len(bad) else "a sum over ranks"
            _LOG.error(
                "the gradient of id %d of table %r (features %s) from %s in update %d is not finite. Its row and slots "
                "stay as they are. Such rows of the table in this update: %d. Later ones are only counted, as "
                "'left_out' in the table's statistics. Look for labels, weights and inputs there that are NaN "
                "or infinite, or take a smaller learning rate.",
                ids[of_row[0]], table, ", ".join(map(repr, self._features[table])), source, update, len(mine),
            )  # fmt: skip


def _received(message: np.ndarray, splits: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids <int64>[V] in the order received, and the segment and the source of each."""
    ids, of_segment, of_source = [], [], []
    for source, block in enumerate(np.split(message, np.cumsum(splits)[:-1])):
        ids.append(block[segments:])
        of_segment.append(np.repeat(np.arange(segments), block[:segments]))
        of_source.append(np.full(len(block) - segments, source))
    return np.concatenate(ids), np.concatenate(of_segment), np.concatenate(of_source)
