"""Checkpointer: saves a training job repeatedly, in full or as deltas, while training goes on."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from logging import getLogger
from typing import Any, TypeVar

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.checkpoint import dense, saving
from tf_fusedrec.checkpoint.layers import saved_embeddings
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import agree, on_rank_0
from tf_fusedrec.exchange.model_state import average_state
from tf_fusedrec.files import saves
from tf_fusedrec.files.table_reader import prefetched

T = TypeVar("T")


class Checkpointer:
    """Saves dense weights and tables into one folder. A finished save replaces the previous one atomically.

    A save copies all rows, or the changed rows, and a thread then writes the copies. All ranks must call `save` and
    `wait` equally often. A crash or a full disk leaves the last complete checkpoint in place.

    A full save has all rows. The saves between two full saves are deltas. A delta has the rows changed since the
    last full save, the removed ids, and all small data. Loading a delta also reads its full save, which is kept as long
    as a delta needs it. Deltas grow until the next full save. The first save is full.

    The last `keep` saves and the best one stay loadable by `load(..., save=...)`. A save is refused if a weight, a row
    or a slot is not finite, or if a dense weight or other state of the model differs between ranks. The background
    thread checks the copies before the save replaces the previous one.

    Args:
      folder: Folder of the checkpoint, on a file system that all ranks see. It may hold a checkpoint already; no
        other job may save there.
      model: Keras model with dense weights and FusedEmbedding layers, or one such layer. Every rank writes its own
        rows and optimizer slots. Ranks with replicas of the same rows write a part each; replicas that train
        separately are synchronized first.
      optimizer: Optimizer of the dense weights, or None.
      layers: Trained FusedEmbedding layers outside the model.
      full_every: Number of saves from one full save to the next, >= 1; 1 makes no deltas.
      keep: Number of saves to keep, >= 1, including the last one. The disk needs room for one more.
      not_finite: Policy for a save with a NaN or infinite number. "refuse": the save fails, as with a full disk.
        "skip": rank 0 logs an error and training goes on. "save": the save is written.
      background: True if a thread writes. False writes before `save` returns, with at most two tables copied at once.
      timeout_s: Seconds that rank 0 waits for the files of the other ranks.

    Attributes:
      pause_s: Seconds by which the last `save` held up training, without the wait for the previous save.

    Raises:
      ValueError: an argument is out of range; the model has no FusedEmbedding layer; two layers have a table of the
        same name; full_every > 1 for tables that do not track changed rows (backend "tfra") or removed ids.
      TypeError: `model` or one of `layers` has another type.

    Examples:
      >>> checkpointer = fr.checkpoint.Checkpointer("deltas", model, model.optimizer, full_every=4)
      >>> checkpointer.save(extra=1)
      >>> checkpointer.save(extra=2)  # the changes since the first save
      >>> checkpointer.wait()
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        model: keras.Model | FusedEmbedding,
        optimizer: Any = None,
        *,
        layers: Sequence[FusedEmbedding] = (),
        full_every: int = 1,
        keep: int = 2,
        not_finite: str = "refuse",
        background: bool = True,
        timeout_s: float = 1800.0,
    ):
        self._folder = pathlib.Path(folder)
        self._model, self._optimizer = model, optimizer
        self._embeddings = saved_embeddings(model, layers, optimizer)
        self._tables: list[Any] = [group.table for layer in self._embeddings for group in layer.internals.groups]
        self._full_every, self._background, self._timeout_s = full_every, background, timeout_s
        if full_every < 1:
            raise ValueError(f"full_every must be >= 1, got {full_every}.")
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}: the last save is always kept.")
        if not_finite not in saving.CHOICES:
            raise ValueError(f"not_finite must be one of {saving.CHOICES}, got {not_finite!r}.")
        self._keep, self._not_finite = keep, not_finite
        for table in self._tables if full_every > 1 else ():
            if not saving.keeps_changes(table):
                raise ValueError(
                    f"full_every must be 1 for tables {table.names}, got {full_every}: their backend does not track "
                    "changed rows, so it cannot save deltas. Use backend='native'."
                )
            if not table.records_tombstones:
                raise ValueError(
                    f"full_every must be 1 for tables {table.names}, got {full_every}: they do not record removed ids, "
                    "so removed rows would come back with the full save. Set record_tombstones=True in their "
                    "TableConfig."
                )
        self.pause_s = 0.0
        self._saves = 0
        # Name of the last complete full save, and the clock of each table at that save.
        self._full: tuple[str, dict[str, int]] | None = None
        self._clears: list[int] | None = None  # count of clears of each table when the last full save began
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unfinished: saving.Plan | None = None  # plan of the save that is not a checkpoint yet

    def save(self, extra: Any = None, *, best: bool = False) -> None:
        """Begins a save and returns once rows and weights are copied. Collective.

        Without `background` it returns once they are written. It waits for the previous save first, because only one
        save is written at a time.

        Args:
          extra: JSON-serializable value that load returns. The value of rank 0 is saved.
          best: True to keep this save, which load(save="best") reads, until a later one is the best.

        Raises:
          OSError, RuntimeError, ValueError: the previous save failed or was refused, on this or another rank; without
            `background`, also this save. Earlier checkpoints stay, and the next save is full.
        """
        self.wait()
        begin = time.perf_counter()
        if hasattr(self._model, "drain"):  # A schedule may still hold gradients that the tables lack.
            self._model.drain()
        if isinstance(self._model, keras.Model):
            average_state(self._model)
        full = self._full if self._saves % self._full_every and self._no_table_cleared() else None
        self._saves += 1
        rank = collectives.rank()
        for layer in self._embeddings:
            layer.synchronize()

        def make_plan() -> tuple[saving.Plan, str]:
            name, since = full or (None, {})
            extra_json = json.dumps(extra)
            return saving.make_plan(self._folder, collectives.size(), name, since), extra_json

        plan, extra_json = on_rank_0(make_plan)
        self._unfinished = plan
        clocks = {name: int(table.clock) for table in self._tables for name in table.names}

        def copy() -> tuple[Iterable[saving.TableCopy], dense.Weights, dict[str, bytes]]:
            tables = itertools.chain.from_iterable(
                saving.copy_tables(
                    [group.table for group in layer.internals.groups],
                    plan,
                    layer.layout.piece,
                    layer.layout.replicas.size,
                )
                for layer in self._embeddings
            )
            weights = dense.copies(self._model, self._optimizer, everything=rank == 0)
            files = dense.snapshot(plan.save, self._model, self._optimizer) if rank == 0 else {}
            return list(tables) if self._background else prefetched(tables), weights, files

        tables, weights, files = self._or_discard(copy)
        if plan.full is None and self._full_every > 1:  # The next deltas refer to this full save.
            for table in self._tables:
                table.forget_tombstones()
            self._clears = [table.clears for table in self._tables]

        def write() -> None:
            try:
                saving.write_shard(self._folder, plan, tables, rank, weights)
                if rank == 0:
                    saving.commit(
                        self._folder, plan, files, json.loads(extra_json), self._timeout_s,
                        keep=self._keep, finite=self._not_finite != "save", best=best,
                    )  # fmt: skip
                if plan.full is None:
                    self._full = plan.save, clocks
            except BaseException as failure:
                saving.give_up(self._folder, plan, rank, failure)
                self._failure = failure

        if self._background:
            self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            write()
            self.wait()
        self.pause_s = time.perf_counter() - begin

    def _no_table_cleared(self) -> bool:
        """Returns whether no rank has cleared a table since the last full save. A load clears tables. Collective."""
        unchanged = self._clears == [table.clears for table in self._tables]
        return all(collectives.all_gather_object(unchanged))

    def wait(self) -> None:
        """Waits until the last save is a checkpoint on the disk. Collective.

        Raises:
          OSError, RuntimeError, ValueError: the save failed or was refused, on this or another rank. Earlier
            checkpoints stay.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

        def raise_failure() -> None:
            failure, self._failure = self._failure, None
            if isinstance(failure, saving.NotFinite) and self._not_finite == "skip":
                getLogger(__name__).error("%s", failure)  # Only rank 0 checks the copies, so only it has a failure.
                self._discard()
            elif failure is not None:
                raise failure

        self._or_discard(raise_failure)
        self._unfinished = None

    def _or_discard(self, work: Callable[[], T]) -> T:
        """Runs `work` on all ranks. A failure on any rank discards the unfinished save."""
        try:
            return agree(work)
        except Exception:
            self._discard()
            raise

    def _discard(self) -> None:
        """Removes the unfinished save, which no rank writes any more.

        The next save is full, because the discarded one may have made the tables forget removed ids.
        """
        self._saves = 0
        if self._unfinished is not None and collectives.rank() == 0:
            saves.discard(self._folder, self._unfinished.save)
        self._unfinished = None


def save(
    folder: str | os.PathLike,
    model: keras.Model | FusedEmbedding,
    optimizer: Any = None,
    *,
    extra: Any = None,
    layers: Sequence[FusedEmbedding] = (),
    keep: int = 2,
    not_finite: str = "refuse",
) -> None:
    """Writes a full checkpoint, which replaces the previous one atomically. Collective.

    Args:
      folder: Folder of the checkpoint, on a file system that all ranks see.
      model: Keras model with dense weights and FusedEmbedding layers, or one such layer. Every rank writes its own
        rows and optimizer slots.
      optimizer: Optimizer of the dense weights, or None.
      extra: JSON-serializable value that load returns. The value of rank 0 is saved.
      layers, keep, not_finite: See Checkpointer.

    Raises:
      OSError, RuntimeError: the save failed on this or another rank, for example on a full disk. Earlier checkpoints
        stay.
      ValueError: a number is not finite, dense weights differ between ranks, or an argument is refused by
        Checkpointer.
      TypeError: see Checkpointer.

    Examples:
      >>> fr.checkpoint.save("checkpoint", model, model.optimizer, extra={"epoch": 2})
      >>> fr.checkpoint.load("checkpoint", model, model.optimizer)
      {'epoch': 2}
      >>> len(fr.checkpoint.saves("checkpoint"))  # names of saves that load takes as `save`
      1
      >>> {name: table.rows.dtype for name, table in fr.checkpoint.read_tables("checkpoint").items()}
      {'item': dtype('float32')}
    """
    options: dict[str, Any] = {"layers": layers, "keep": keep, "not_finite": not_finite}
    Checkpointer(folder, model, optimizer, **options, background=False).save(extra)
