"""Logs tables with rows that hardly move in their first epoch, which a falling loss of the dense layers hides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.embedding.layer import tables_in
from tf_fusedrec.exchange import collectives
from tf_fusedrec.tables.native import NativeTable

LEAST = 1e-3  # movement of the median row, as a share of its norm
_LARGEST = 10_000_000  # rows of a table up to which ids are listed
_SAMPLE = 1000  # rows that are read

_LOG = logging.getLogger("tf_fusedrec.tables")


class RowMovement(keras.callbacks.Callback):
    """Logs a warning, once per native table, if its rows moved less than LEAST of their norm in the epoch.

    A table is looked at once: after the first epoch in which it is trained. The rows of the epoch are compared with
    their initial rows, which are a function of the id. So rows of a checkpoint count with all of their training. Rank 0
    looks at its own rows. PipelinedModel.fit calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done: set[str] = set()  # names of tables
        self._before: dict[str, tuple[int, int]] = {}  # clock and updates of a table when the epoch began

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._before = {
            name: (table.clock, int(table.optimizer.iterations)) for table in self._tables() for name in table.names
        }

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        for table in self._tables():
            for name in set(table.names) - self._done:
                clock, updates = self._before.get(name, (0, 0))
                if int(table.optimizer.iterations) > updates and table.size(name) <= _LARGEST:
                    self._done.add(name)
                    self._tell(name, table, *table.sample(name, _SAMPLE, since=clock))

    def _tables(self) -> list[NativeTable]:
        if collectives.rank() != 0:
            return []
        return [table for table in tables_in(self.model) if isinstance(table, NativeTable)]

    @staticmethod
    def _tell(name: str, table: NativeTable, rows: np.ndarray, initial: np.ndarray) -> None:
        norms = np.linalg.norm(initial, axis=1)
        if not norms.any():
            return
        moved = np.linalg.norm(rows - initial, axis=1)[norms > 0] / norms[norms > 0]
        median = float(np.median(moved))
        if median < LEAST:
            _LOG.warning(
                "the rows of table %r hardly train: in its first epoch the median row moved by %.1e of its norm, and "
                "%.0e is the least expected. The optimizer is %s. Use a larger learning rate, a smaller "
                "initial_accumulator_value, or Adam.",
                name, median, LEAST, table.optimizer.rule,
            )  # fmt: skip
