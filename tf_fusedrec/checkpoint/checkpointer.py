"""Checkpointer: saves a training job again and again, full or what has changed, while training goes on."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tf_fusedrec import collectives
from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint import dense, saving
from tf_fusedrec.checkpoint.agreement import agree, of_rank_0
from tf_fusedrec.checkpoint.ahead import ahead
from tf_fusedrec.checkpoint.layers import embeddings_of, finds_layers
from tf_fusedrec.embedding import FusedEmbedding


class Checkpointer:
    """Saves dense weights and tables into one directory; each save replaces the last one at its end, at once.

    A save copies the rows (all, or those that have changed), then a thread writes them. All ranks call `save` and
    `wait` equally often. A crash at any moment, or a disk that is full, leaves the last checkpoint that was complete.

    A full save holds all rows. Between two of them come deltas: rows that have changed since the last full save, ids
    that were removed, and all that is small. A delta is loaded together with that full save, which stays until the
    next; so deltas grow until then. The first save is full.

    Args:
      directory: on a file system that all ranks see. It may hold a checkpoint; nothing else may save there.
      model: dense weights, and the tables of all FusedEmbedding layers in it; or one such layer. Every rank writes its
        own rows with their optimizer slots. Ranks that hold replicas of the same rows write a part of them each, after
        replicas that train apart have been synchronised.
      optimizer: of the dense weights, or None.
      layers: FusedEmbedding layers that are trained and that the model does not hold.
      full_every: every full_every-th save is full; 1 makes no deltas.
      background: False writes before `save` returns, table by table, so that two tables at a time are copied.
      timeout_s: seconds that rank 0 waits for the files of the others.

    Attributes:
      pause_s: seconds that the last `save` took from training, without waiting for the one before.

    Raises:
      ValueError: the model has no FusedEmbedding layer, or two with a table of the same name; deltas are asked of
        tables that do not know which rows have changed (backend TFRA) or have gone.
      TypeError: a layer comes as an argument beside the model.
    """

    @finds_layers(3)
    def __init__(
        self,
        directory: str | os.PathLike,
        model: keras.Model | FusedEmbedding,
        optimizer: Any = None,
        *,
        layers: Sequence[FusedEmbedding] = (),
        full_every: int = 1,
        background: bool = True,
        timeout_s: float = 1800.0,
    ):
        self._directory = pathlib.Path(directory)
        self._model, self._optimizer = model, optimizer
        self._embeddings = embeddings_of(model, layers)
        self._tables: list[Any] = [lookup.table for layer in self._embeddings for lookup in layer.lookups]
        self._full_every, self._background, self._timeout_s = full_every, background, timeout_s
        if full_every < 1:
            raise ValueError(f"full_every must be >= 1, got {full_every}.")
        for table in self._tables if full_every > 1 else ():
            if not saving.keeps_changes(table):
                raise ValueError(
                    f"full_every must be 1 for tables {table.names}, got {full_every}: their backend does not know "
                    "which rows have changed, so there are no deltas. Use backend='native'."
                )
            if not table.records_tombstones:
                raise ValueError(
                    f"full_every must be 1 for tables {table.names}, got {full_every}: rows that leave them would come "
                    "back with the full save. Set record_tombstones=True in their TableConfig."
                )
        self.pause_s = 0.0
        self._saves = 0
        # The last full save that is a checkpoint, and the clock of each table then; None before there is one.
        self._full: tuple[str, dict[str, int]] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, extra: Any = None) -> None:
        """Begins a save and returns when rows and weights are copied (or written, without background). Collective.

        Waits for the save before first: only one is written at a time.

        Args:
          extra: JSON-able; given back by load. Rank 0's counts.

        Raises:
          OSError, RuntimeError: the save before this one has failed, here or on another rank; or, without background,
            this one. The last checkpoint stands, and the next save will be full.
        """
        self.wait()
        begin = time.perf_counter()
        if hasattr(self._model, "drain"):  # a schedule may hold gradients back
            self._model.drain()
        full = self._full if self._saves % self._full_every else None
        self._saves += 1
        rank = collectives.rank()
        for layer in self._embeddings:
            layer.synchronize()

        def begun() -> tuple[saving.Plan, str]:
            name, since = full or (None, {})
            return saving.make_plan(self._directory, collectives.size(), name, since), json.dumps(extra)

        plan, told = of_rank_0(begun)
        clocks = {name: int(table.clock) for table in self._tables for name in table.names}

        def copied() -> tuple[Iterable[saving.Cut], dict[str, bytes]]:
            cuts = itertools.chain.from_iterable(
                saving.cut_tables(
                    [lookup.table for lookup in layer.lookups], plan, layer.place.piece, layer.place.replicas.size
                )
                for layer in self._embeddings
            )
            weights = dense.snapshot(plan.save, self._model, self._optimizer) if rank == 0 else {}
            return list(cuts) if self._background else ahead(cuts), weights

        cuts, weights = agree(copied)
        for table in self._tables if plan.full is None and self._full_every > 1 else ():
            table.forget_tombstones()  # the deltas to come go with this save

        def write() -> None:
            try:
                saving.write_shard(self._directory, plan, cuts, rank)
                if rank == 0:
                    saving.commit(self._directory, plan, weights, json.loads(told), self._timeout_s)
                if plan.full is None:
                    self._full = plan.save, clocks
            except BaseException as failure:
                saving.give_up(self._directory, plan, rank, failure)
                self._failure = failure

        if self._background:
            self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            write()
            self.wait()
        self.pause_s = time.perf_counter() - begin

    def wait(self) -> None:
        """Returns when the last save is a checkpoint on the disk. Collective.

        Raises:
          OSError, RuntimeError: it has failed, here or on another rank. The last checkpoint stands.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

        def raise_failure() -> None:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

        try:
            agree(raise_failure)
        except Exception:
            self._saves = 0  # the next is full: removed ids may have been forgotten with the save that failed
            raise


@finds_layers(2)
def save(
    directory: str | os.PathLike,
    model: keras.Model | FusedEmbedding,
    optimizer: Any = None,
    *,
    extra: Any = None,
    layers: Sequence[FusedEmbedding] = (),
) -> None:
    """Writes a full checkpoint; all ranks call it. One that stood in `directory` is replaced at the end, at once.

    Args:
      directory: of the checkpoint, on a file system that all ranks see.
      model: dense weights, and the tables of all FusedEmbedding layers in it; or one such layer. Every rank writes its
        own rows with their optimizer slots.
      optimizer: of the dense weights, or None.
      extra: JSON-able; given back by load.
      layers: FusedEmbedding layers that are trained and that the model does not hold.

    Raises:
      OSError, RuntimeError: it failed, here or on another rank (a full disk, for example). The last checkpoint stands.
      ValueError, TypeError: as Checkpointer.
    """
    Checkpointer(directory, model, optimizer, layers=layers, background=False).save(extra)
