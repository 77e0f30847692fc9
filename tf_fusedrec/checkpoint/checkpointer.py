"""Checkpointer: saves a training job again and again, full or what has changed, while training goes on."""

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
from tf_fusedrec.checkpoint import dense, folders, saving, verdict
from tf_fusedrec.checkpoint.agreement import agree, of_rank_0
from tf_fusedrec.checkpoint.ahead import ahead
from tf_fusedrec.checkpoint.layers import embeddings_of, finds_layers
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives

T = TypeVar("T")


class Checkpointer:
    """Saves dense weights and tables into one directory; each save takes the place of the last one at its end, at once.

    A save copies the rows (all, or those that have changed), then a thread writes them. All ranks call `save` and
    `wait` equally often. A crash at any moment, or a disk that is full, leaves the last checkpoint that was complete.

    A full save holds all rows. Between two of them come deltas: rows that have changed since the last full save, ids
    that were removed, and all that is small. A delta is loaded together with that full save, which stays as long as a
    delta needs it; so deltas grow until the next full one. The first save is full.

    The last `keep` saves stay, each with all that it needs, and `load(..., save=...)` takes any of them. A save is
    refused when a weight, a row or a slot is not finite, or a trainable dense weight differs between ranks: the copies
    are judged behind training's back, before the save takes the place of the last one.

    Args:
      directory: on a file system that all ranks see. It may hold a checkpoint; nothing else may save there.
      model: dense weights, and the tables of all FusedEmbedding layers in it; or one such layer. Every rank writes its
        own rows with their optimizer slots. Ranks that hold replicas of the same rows write a part of them each, after
        replicas that train apart have been synchronised.
      optimizer: of the dense weights, or None.
      layers: FusedEmbedding layers that are trained and that the model does not hold.
      full_every: every full_every-th save is full; 1 makes no deltas.
      keep: >= 1, saves that stay, the last one included. The disk needs room for one more.
      not_finite: what becomes of a save with a number that is NaN or infinite. "refuse": it fails, as with a full disk.
        "skip": rank 0 logs an error, and training goes on. "save": it is written.
      background: False writes before `save` returns, table by table, so that two tables at a time are copied.
      timeout_s: seconds that rank 0 waits for the files of the others.

    Attributes:
      pause_s: seconds that the last `save` took from training, without waiting for the one before.

    Raises:
      ValueError: an argument is out of its range; the model has no FusedEmbedding layer, or two with a table of one
        name; deltas are asked of tables that do not know which rows have changed (backend TFRA) or have gone.
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
        keep: int = 2,
        not_finite: str = "refuse",
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
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}: the last save stays.")
        if not_finite not in verdict.CHOICES:
            raise ValueError(f"not_finite must be one of {verdict.CHOICES}, got {not_finite!r}.")
        self._keep, self._not_finite = keep, not_finite
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
        self._clears: list[int] | None = None  # of each table, when the last full save began
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._begun: saving.Plan | None = None  # the save that is no checkpoint yet

    def save(self, extra: Any = None) -> None:
        """Begins a save and returns when rows and weights are copied (or written, without background). Collective.

        Waits for the save before first: only one is written at a time.

        Args:
          extra: JSON-able; given back by load. Rank 0's counts.

        Raises:
          OSError, RuntimeError, ValueError: the save before this one has failed or was refused, here or on another
            rank; or, without background, this one. Earlier checkpoints stand, and the next save will be full.
        """
        self.wait()
        begin = time.perf_counter()
        if hasattr(self._model, "drain"):  # a schedule may hold gradients back
            self._model.drain()
        full = self._full if self._saves % self._full_every and self._none_was_cleared() else None
        self._saves += 1
        rank = collectives.rank()
        for layer in self._embeddings:
            layer.synchronize()

        def begun() -> tuple[saving.Plan, str]:
            name, since = full or (None, {})
            told = json.dumps(extra)
            return saving.make_plan(self._directory, collectives.size(), name, since), told

        plan, told = of_rank_0(begun)
        self._begun = plan
        clocks = {name: int(table.clock) for table in self._tables for name in table.names}

        def copied() -> tuple[Iterable[saving.Cut], dense.Weights, dict[str, bytes]]:
            cuts = itertools.chain.from_iterable(
                saving.cut_tables(
                    [lookup.table for lookup in layer.lookups], plan, layer.place.piece, layer.place.replicas.size
                )
                for layer in self._embeddings
            )
            weights = dense.copies(self._model, self._optimizer, everything=rank == 0)
            files = dense.snapshot(plan.save, self._model, self._optimizer) if rank == 0 else {}
            return list(cuts) if self._background else ahead(cuts), weights, files

        cuts, weights, files = self._or_discarded(copied)
        for table in self._tables if plan.full is None and self._full_every > 1 else ():
            table.forget_tombstones()  # the deltas to come go with this save
        if plan.full is None and self._full_every > 1:
            self._clears = [table.clears for table in self._tables]

        def write() -> None:
            try:
                saving.write_shard(self._directory, plan, cuts, rank, weights)
                if rank == 0:
                    saving.commit(
                        self._directory, plan, files, json.loads(told), self._timeout_s,
                        keep=self._keep, finite=self._not_finite != "save",
                    )  # fmt: skip
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

    def _none_was_cleared(self) -> bool:
        """Whether no rank has cleared a table since the last full save, as a load does. Collective."""
        mine = self._clears == [table.clears for table in self._tables]
        return all(collectives.all_gather_object(mine))

    def wait(self) -> None:
        """Returns when the last save is a checkpoint on the disk. Collective.

        Raises:
          OSError, RuntimeError, ValueError: it has failed or was refused, here or on another rank. Earlier checkpoints
            stand.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

        def raise_failure() -> None:
            failure, self._failure = self._failure, None
            if isinstance(failure, verdict.NotFinite) and self._not_finite == "skip":
                getLogger(__name__).error("%s", failure)  # rank 0 alone compares
                self._discard()
            elif failure is not None:
                raise failure

        self._or_discarded(raise_failure)
        self._begun = None

    def _or_discarded(self, work: Callable[[], T]) -> T:
        """`work` on all ranks. Where it fails on one, nothing is left of the save that has begun."""
        try:
            return agree(work)
        except Exception:
            self._discard()
            raise

    def _discard(self) -> None:
        """No rank writes any more. The next save is full: removed ids may have been forgotten with this one."""
        self._saves = 0
        if self._begun is not None and collectives.rank() == 0:
            folders.discard(self._directory, self._begun.save)
        self._begun = None


@finds_layers(2)
def save(
    directory: str | os.PathLike,
    model: keras.Model | FusedEmbedding,
    optimizer: Any = None,
    *,
    extra: Any = None,
    layers: Sequence[FusedEmbedding] = (),
    keep: int = 2,
    not_finite: str = "refuse",
) -> None:
    """Writes a full checkpoint; all ranks call it. It takes the place of the last one at the end, at once.

    Args:
      directory: of the checkpoint, on a file system that all ranks see.
      model: dense weights, and the tables of all FusedEmbedding layers in it; or one such layer. Every rank writes its
        own rows with their optimizer slots.
      optimizer: of the dense weights, or None.
      extra: JSON-able; given back by load.
      layers, keep, not_finite: as for Checkpointer.

    Raises:
      OSError, RuntimeError: it failed, here or on another rank (a full disk, for example). Earlier checkpoints stand.
      ValueError: it was refused: a number is not finite (NotFinite), dense weights differ between ranks; or as
        Checkpointer. TypeError: as Checkpointer.
    """
    options: dict[str, Any] = {"layers": layers, "keep": keep, "not_finite": not_finite}
    Checkpointer(directory, model, optimizer, **options, background=False).save(extra)
