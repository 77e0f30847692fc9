"""The contract of a table backend, which looks up and trains the rows of one group of tables on one rank.

A lookup asks a table for its abilities (`can_...`), never for its class.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Sequence
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
      can_defer: True if lookups of later steps may come before the update of an earlier one.
      can_look_ahead: True if `look_ahead` and `refresh` work.
      splits_answers: True if one lookup can answer several requests of a step.
      most_lookups_per_update: Largest number of steps whose lookups may come before the update of the first; None: any.
      can_prefetch: True if `prefetch` has an effect, because rows may be on disk.
      moves_rows: True if a training lookup may move or evict rows of an earlier one.
      takes_duplicates: True if a source may send an id twice.
      ids_on_host: True if ids travel in host memory, although rows and gradients travel between devices.
      replaced: Number of calls of `clear` and `restore`, after which answers to earlier lookups are out of date.
    """

    names: list[str]
    owner: str
    id_bits: int
    optimizer: Any
    left_out: dict[str, int]
    can_defer = False
    can_look_ahead = False
    splits_answers = False
    most_lookups_per_update: int | None = None
    can_prefetch = False
    moves_rows = False
    takes_duplicates = True
    ids_on_host = False
    replaced = 0

    @abc.abstractmethod
    def lookup(self, message: tf.Tensor, splits: tf.Tensor, *, training: bool) -> Answer:
        """Finds the rows of the received ids.

        Args:
          message: <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see ops.rank_partition.
          splits: <int32>[R], entries of each block.
          training: True if ids without a row get one. Otherwise TableConfig.unknown names their row.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, parts: Sequence[tuple[Any, tf.Tensor]], scale: float, checks: Sequence[tf.Operation] = ()
    ) -> LeftOutRows | None:
        """Trains the rows of training lookups by the sum of their gradients, as one update.

        Args:
          parts: The answer to each lookup and its gradients <dtype>[>= V, D] in the order received.
          scale: Factor of all gradients.
          checks: Ops that run before rows change. If one fails, no row changes.

        Returns:
          The left out rows; None if the table does not look for them.
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
        """Reads the rows of a coming training lookup, and changes nothing. Arguments as in `lookup`."""
        raise self._cannot("look ahead")

    def refresh(self, message: tf.Tensor, splits: tf.Tensor, rows_ahead: ops.RowsAhead) -> Answer:
        """The answer of a training lookup, sooner than by `lookup`, from look_ahead's result for the same message."""
        raise self._cannot("look ahead")

    def lookup_shared(
        self,
        message: tf.Tensor,
        splits: tf.Tensor,
        trained: tuple[tf.Tensor, tf.Tensor],
        rows_ahead: ops.RowsAhead | None,
    ) -> ops.TableRows:
        """A training lookup of the ids of all groups of ranks, which reads the rows of one group.

        Args:
          message, splits: The ids of the own group, as in `lookup`.
          trained: The ids of all groups, likewise. They change the table as in `lookup`.
          rows_ahead: The result of `look_ahead` for `message`, or None.

        Returns:
          The rows of `message`, and handles and inverse of `trained`.
        """
        raise self._cannot("share gradients among groups of ranks")

    def prefetch(self, message: tf.Tensor, splits: tf.Tensor) -> None:
        """Starts to read rows of a coming lookup from disk. Changes nothing. Arguments as in `lookup`."""
        raise self._cannot("prefetch rows")

    def _cannot(self, what: str) -> ValueError:
        return ValueError(f"tables {self.names} of {type(self).__name__} cannot {what}. Remedy: backend='native'.")


class StoredTable(Table):
    """A table whose rows a checkpoint saves and restores. All methods are eager and see this rank's rows alone.

    Attributes:
      records_tombstones: True if the table remembers ids that leave.
      clock: Counters of the table in one number that only grows; 0 where a table keeps none.
    """

    records_tombstones = False
    clock = 0

    def sections_of(self, name: str) -> tuple[str, ...]:
        """Kinds of records of one table: "rows", and for some tables "candidates", ids that wait for admission."""
        return ("rows",)

    @abc.abstractmethod
    def spec(self, name: str) -> dict[str, Any]:
        """The format of a stored row, JSON-able. Rows fit another table if both have equal specs."""

    @abc.abstractmethod
    def record_dtype(self, section: str) -> np.dtype:
        """The structured, packed dtype of a record. bfloat16 numbers are bits, <u2."""

    @abc.abstractmethod
    def snapshot(
        self, name: str, section: str = "rows", since: int | None = None, *, in_hash_order: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """A copy of the records of one table.

        Args:
          name: Name of the table.
          section: One of `sections_of(name)`.
          since: A value of `clock`, for rows that changed after it alone; None for all rows.
          in_hash_order: True to sort by Mix64(id). It takes longer than the copy, so a save sorts in the background.

        Returns:
          ids <int64>[n] and records <record_dtype>[n].

        Raises:
          ValueError: `since`, but the table does not know which rows have changed.
        """

    @abc.abstractmethod
    def restore(self, name: str, section: str, ids: np.ndarray, records: np.ndarray) -> None:
        """Inserts or overwrites the rows of a snapshot, bit by bit. Raises ValueError for ids that do not fit."""

    @abc.abstractmethod
    def new_records(self, name: str, n: int) -> np.ndarray:
        """<record_dtype>[n] of rows that were never trained: "row" is zero, slots have their first values."""

    @abc.abstractmethod
    def remove(self, name: str, ids: np.ndarray) -> None:
        """Removes rows. Ids without a row have no effect."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Removes all rows and everything that belongs to them."""

    def tombstones(self, name: str) -> np.ndarray:
        """ids <int64>[n], ascending, that left since the last `forget_tombstones` and have not come back."""
        raise self._cannot("record removed ids")

    @property
    def row_bytes(self) -> int:
        return self.record_dtype("rows").itemsize


_TABLES: dict[str, Callable[..., Table]] = {}  # by backend


def register_backend(name: str, make_table: Callable[..., Table]) -> None:
    """Makes `make_table` the class of FusedEmbedding(backend=name)."""
    _TABLES[name] = make_table


def backend_table(name: str) -> Callable[..., Table]:
    """The class that `name`'s package has registered.

    Raises:
      ImportError: TFRA, which is an extra, is not installed.
    """
    if name not in _TABLES:
        importlib.import_module(f"tf_fusedrec.{name}.table")
    return _TABLES[name]
