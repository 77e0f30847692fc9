"""The contract of a table backend: rows of one group of tables on one rank. It knows neither ranks nor features."""

from __future__ import annotations

import abc
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

# <int64>[V + R * S], blocks [counts[S] | ids] of R sources, see ops.rank_partition; entries of each block, <int32>[R].
Message = tuple[tf.Tensor, tf.Tensor]


class LeftOutRows(NamedTuple):
    """Rows that an update left unchanged, because their gradients are not finite."""

    numbers: Sequence[tf.Tensor]  # <int32>[k] for each lookup of the update, numbers in its `inverse`
    inverses: Sequence[tf.Tensor]  # <int32>[V] for each lookup, number of each received id's row
    update: tf.Tensor  # <int64>[], number of the update


class Table(abc.ABC):
    """Rows of the tables of one group on this rank. Table s of the group is segment s of every message.

    Methods from `size` on are eager and see this rank's rows only.

    Attributes:
      names: Names of the tables, by segment.
      owner: Name of the function from ids to ranks, see ops.rank_partition.
      id_bits: Ids must be in [0, 2^id_bits); 64 admits every int64.
      optimizer: The optimizer that trains the rows; None for tables that are never trained.
      left_out: By table, the number of rows that updates left unchanged, because a gradient was not finite.
      prefetches: True if rows may be on disk, so that `prefetch` has an effect.
      takes_duplicates: True if a source may send an id twice.
      ids_on_host: True if ids travel in host memory, although rows and gradients travel between devices.
      replaced: Number of calls of `clear` and `restore`, after which answers to earlier lookups are out of date.
      records_tombstones: True if the table records ids that leave.
      clock: Counters of the table in one number that only grows; 0 where a table keeps none.
    """

    names: list[str]
    owner: str
    id_bits: int
    optimizer: Any
    left_out: dict[str, int]
    prefetches = False
    takes_duplicates = True
    ids_on_host = False
    replaced = 0
    records_tombstones = False
    clock = 0

    @property
    def partition(self) -> Callable[..., ops.RankedIds]:
        """ops.rank_partition for the owners of these tables."""
        return functools.partial(ops.rank_partition, owner=self.owner, id_bits=self.id_bits, segment_names=self.names)

    @abc.abstractmethod
    def lookup(
        self,
        request: Message,
        ahead: ops.RowsAhead | None = None,
        *,
        sums: ops.RowSums | None = None,
        with_rows: bool = True,
        lookups_per_update: int = 1,
    ) -> Any:
        """The training lookup: finds or inserts rows. One tick of the table's clock.

        Args:
          request: The received ids.
          ahead: The result of `look_ahead` for `request`: only rows that changed since are read. None: all are.
          sums: The sums to answer in place of rows, where there are any. Only native tables on a CPU get them.
          with_rows: False for an answer without rows.
          lookups_per_update: Number of lookups, with this one, before the update of the first. Their rows neither leave
            nor move.

        Returns:
          A NamedTuple with the fields of ops.TableRows, which may wait for a later training step.
        """

    @abc.abstractmethod
    def read(self, request: Message, ahead: ops.RowsAhead | None = None, *, lookups_per_update: int = 0) -> tf.Tensor:
        """The rows <dtype>[P, D] of received ids, padding after the V-th. Changes nothing.

        Args:
          request, ahead: As in `lookup`.
          lookups_per_update: Above 0: the rows are those that such a `lookup` would answer. 0: TableConfig.unknown
            names the row of an id without one.
        """

    @abc.abstractmethod
    def update(
        self,
        parts: Sequence[tuple[Any, tf.Tensor, ops.RowSums | None]],
        scale: float,
        checks: Sequence[tf.Operation] = (),
        *,
        as_they_come: bool = False,
    ) -> LeftOutRows | None:
        """Trains the rows of training lookups by the sum of their gradients, as one update.

        Args:
          parts: The answer to each lookup and its gradients <dtype>[>= V, D] in the order received, or of sums [M, D].
          scale: Factor of all gradients.
          checks: Ops that run before rows change. If one fails, no row changes.
          as_they_come: True to train a row when its last gradient is here, before the other parts are. Checks then run
            before the last part, and rows of others have changed if one fails.

        Returns:
          The left out rows; None if the table does not look for them.
        """

    def look_ahead(self, request: Message) -> ops.RowsAhead:
        """Reads the rows of a coming training lookup. Changes nothing."""
        raise self._cannot("look ahead")

    def prefetch(self, request: Message) -> None:
        """Starts to read rows of a coming lookup from disk. Changes nothing."""
        raise self._cannot("prefetch rows")

    @abc.abstractmethod
    def check_deferrable(self, steps: int) -> None:
        """Raises ValueError unless the lookups of `steps` steps may precede the update of the first."""

    def check_calls(self, calls: int) -> None:  # noqa: B027, because most tables refuse nothing
        """Raises ValueError unless `calls` lookups may precede one update."""

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """The number of rows of one table."""

    @property
    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table, see FusedEmbedding.statistics."""
        return {name: {"keys": self.size(name)} for name in self.names}

    @abc.abstractmethod
    def export(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The rows of one table: ids <int64>[n], ascending, and rows [n, D] of the table's dtype."""

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
          since: A value of `clock`, for rows that changed after it; None for all rows.
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
        """ids <int64>[n], ascending, that left since the last `forget_tombstones` and have not returned."""
        raise self._cannot("record removed ids")

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row with its slots and counters, without its key."""
        return self.record_dtype("rows").itemsize

    def _cannot(self, what: str) -> ValueError:
        return ValueError(f"tables {self.names} of {type(self).__name__} cannot {what}. Use backend='native'.")


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
