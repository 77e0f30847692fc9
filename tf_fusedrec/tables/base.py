"""The contract of a table backend: rows of one group of tables on one rank, looked up and trained by id.

A table knows ids, rows and optimizers. It knows no ranks and no features. The lookup asks a table what it can do
(`can_...`) and never for its class.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf


class Answer(Protocol):
    """A table's answer to a lookup: a NamedTuple of tensors, which may wait for a later training step."""

    @property
    def rows(self) -> tf.Tensor:
        """<dtype>[P, D], row of each id in the order received; P >= V, rows behind the V-th are padding."""


class InferenceRows(NamedTuple):
    """The answer to a lookup that does not train."""

    rows: tf.Tensor  # <dtype>[P, D]


class LeftOutRows(NamedTuple):
    """Rows that an update left unchanged, because their gradients are not finite."""

    numbers: Sequence[tf.Tensor]  # <int32>[k] for each lookup of the update, numbers in its `inverse`
    inverses: Sequence[tf.Tensor]  # <int32>[V] for each lookup, number of each received id's row
    update: tf.Tensor  # <int64>[], number of the update


class Table(abc.ABC):
    """Rows of one group of tables. Table s of the group is segment s of every message.

    Attributes:
      names: Names of the tables, by segment.
      owner: Name of the function from ids to ranks, see ops.rank_partition.
      id_bits: Ids must lie in [0, 2^id_bits); 64 admits every int64.
      optimizer: The optimizer that trains the rows; None for tables that are never trained.
      left_out: By table, the number of rows that updates left unchanged, because a gradient was not finite.
      can_defer: Whether lookups of later steps may come before the update of an earlier one.
      can_look_ahead: Whether `look_ahead` and `refresh` work.
      can_accumulate: Whether the gradients of several lookups can make one update.
      can_prefetch: Whether `prefetch` has an effect, because rows may be on disk.
      moves_rows: Whether a training lookup may move or evict rows of an earlier one.
      takes_duplicates: Whether a source may send an id twice.
    """

    names: list[str]
    owner: str
    id_bits: int
    optimizer: Any
    left_out: dict[str, int]
    can_defer = False
    can_look_ahead = False
    can_accumulate = False
    can_prefetch = False
    moves_rows = False
    takes_duplicates = True

    @abc.abstractmethod
    def lookup(self, message: tf.Tensor, splits: tf.Tensor, *, training: bool) -> Answer:
        """Finds the rows of the received ids.

        Args:
          message: <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see ops.rank_partition.
          splits: <int32>[R], entries of each block.
          training: Whether ids without a row get one; else their row is what TableConfig.unknown says.
        """

    @abc.abstractmethod
    def apply_gradients(self, parts: Sequence[tuple[Any, tf.Tensor]], scale: float) -> LeftOutRows | None:
        """Trains the rows of training lookups by the sum of their gradients, as one update.

        Args:
          parts: The answer to each lookup and its gradients <dtype>[>= V, D] in the order received. More than one
            part needs can_accumulate.
          scale: Factor of all gradients.

        Returns:
          The left out rows; None where the table does not look for them.
        """

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """The number of rows of one table on this rank. Eager."""

    @abc.abstractmethod
    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """This rank's rows of one table: ids <int64>[n], ascending, and rows [n, D] of the table's dtype. Eager."""

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one stored row with its slots and counters, without its key."""

    def look_ahead(self, message: tf.Tensor, splits: tf.Tensor) -> ops.RowsAhead:
        """Reads the rows that a coming training lookup will want. Changes nothing. Arguments as those of `lookup`."""
        raise self._cannot("look ahead")

    def refresh(self, message: tf.Tensor, splits: tf.Tensor, ahead: ops.RowsAhead) -> Answer:
        """The answer of a training lookup, sooner: `ahead` is what `look_ahead` read for the same message."""
        raise self._cannot("look ahead")

    def lookup_shared(
        self,
        message: tf.Tensor,
        splits: tf.Tensor,
        trained: tuple[tf.Tensor, tf.Tensor],
        ahead: ops.RowsAhead | None,
    ) -> ops.TableRows:
        """A training lookup of the ids of all groups of ranks, which reads the rows of one group.

        Args:
          message, splits: The ids of the own group, as in `lookup`.
          trained: The ids of all groups, likewise. They change the table as those of `lookup` do.
          ahead: The result of `look_ahead` for `message`, or None.

        Returns:
          The rows of `message`, and handles and inverse of `trained`.
        """
        raise self._cannot("share gradients among groups of ranks")

    def prefetch(self, message: tf.Tensor, splits: tf.Tensor) -> None:
        """Asks the disk for rows that a coming lookup will want. Changes nothing. Arguments as those of `lookup`."""
        raise self._cannot("prefetch rows")

    def _cannot(self, what: str) -> ValueError:
        return ValueError(f"tables {self.names} of {type(self).__name__} cannot {what}. Remedy: backend='native'.")
