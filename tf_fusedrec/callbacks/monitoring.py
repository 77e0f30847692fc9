"""Keras callbacks that watch a training job on several ranks: what its tables and exchanges did, and when to stop.

All ranks must fit with the same list, and log and decide the same. The order that works: Throughput,
ModelFlopsUtilization, EmbeddingMetrics, then Keras' TensorBoard on rank 0, and EarlyStopping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives

_COUNTS = ("hits", "inserts", "refused", "evictions")


class EmbeddingMetrics(keras.callbacks.Callback):
    """After every epoch, puts into the logs what the tables and exchanges of all ranks did in it. Collective.

    The logs, and so the progress bar and the history, have totals over all tables. What cannot be known is left out:

      table_rows       rows at the end of the epoch
      table_growth     rows more than at its beginning; below 0 when more have left than came
      table_hit_rate   of the distinct ids of training lookups, the part that had a row           (backend "native")
      table_evictions  rows that were evicted                                                    (backend "native")
      dedup_ratio      ids that features asked for over ids that were sent (several ranks, or pooled features)
      all2all_bytes    that a rank sends to others in a training step, ids, rows and gradients; the mean (several ranks)
      exposed_ms       of the median step that `timeline` has recorded: an exchange ran, and no op

    TensorBoard writes logs as scalars "epoch_<name>". The first four of each table T are scalars "epoch_rows/T",
    "epoch_growth/T", "epoch_hit_rate/T" and "epoch_evictions/T" in `directory`.

    Replicas of the tables (Topology) are counted once each.

    Args:
      embedding: the layer.
      timeline: a callback of the same fit; None for no exposed_ms.
      directory: where rank 0 writes scalars of each table, such as a folder inside TensorBoard's; None: nowhere.
    """

    def __init__(
        self,
        embedding: FusedEmbedding,
        timeline: Timeline | None = None,
        *,
        directory: str | os.PathLike | None = None,
    ):
        super().__init__()
        self._embedding, self._timeline = embedding, timeline
        self._before: dict[str, np.ndarray] = {}
        self._steps = 0
        self._writer = None
        if directory is not None and collectives.rank() == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(directory))

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._before, self._steps = self._counted(), 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if logs is None:
            return
        now = self._counted()
        tables = {name: (now[name][0], now[name] - self._before[name]) for name in self._tables()}
        total = np.sum([rows for rows, _ in tables.values()]), np.sum([done for _, done in tables.values()], axis=0)
        logs.update({f"table_{kind}": value for kind, value in _told(*total).items()})
        self._write(epoch, tables)
        asked, sent, sent_bytes = now["traffic"] - self._before["traffic"]
        if sent:
            logs["dedup_ratio"] = float(asked) / float(sent)
        if sent_bytes:
            logs["all2all_bytes"] = float(sent_bytes) / (collectives.size() * max(self._steps, 1))
        exposed = self._exposed_ms()
        if exposed is not None:
            logs["exposed_ms"] = exposed

    def _write(self, epoch: int, tables: Mapping[str, tuple[int, np.ndarray]]) -> None:
        if self._writer is None:
            return
        with tf.summary.record_if(True), self._writer.as_default(step=epoch):
            for name, counts in tables.items():
                for kind, value in _told(*counts).items():
                    tf.summary.scalar(f"epoch_{kind}/{name}", value)
        self._writer.flush()

    def _tables(self) -> list[str]:
        return [name for lookup in self._embedding.lookups for name in lookup.table.names]

    def _counted(self) -> dict[str, np.ndarray]:
        """Since training began, of all ranks: rows, hits, inserts, refused and evictions by table, and "traffic"."""
        mine = []
        for lookup in self._embedding.lookups:
            statistics = getattr(lookup.table, "statistics", {})
            for name in lookup.table.names:
                counts = [statistics.get(name, {}).get(kind, 0) for kind in _COUNTS]
                mine.append([lookup.table.size(name), *counts])
        traffic = np.sum([lookup.traffic.numpy() for lookup in self._embedding.lookups], axis=0, dtype=np.int64)
        flat = np.concatenate([np.array(mine, np.int64).ravel(), traffic])
        total = collectives.all_gather(flat[np.newaxis]).sum(axis=0)
        by_table = total[: -len(traffic)].reshape(-1, 1 + len(_COUNTS))
        return {**dict(zip(self._tables(), by_table)), "traffic": total[-len(traffic) :]}

    def _exposed_ms(self) -> float | None:
        if self._timeline is None:
            return None
        mine = [step.exposed_ms for step in self._timeline.steps]  # rank 0 alone records
        recorded = collectives.all_gather_object(mine)[0]
        return float(np.median(recorded)) if recorded else None


def _told(rows: int, done: np.ndarray) -> dict[str, float]:
    """Of one table or of all: `done` are the differences of what `_counted` counts."""
    growth, hits, inserts, refused, evictions = done
    told = {"rows": float(rows), "growth": float(growth)}
    if asked := hits + inserts + refused:
        told.update(hit_rate=float(hits / asked), evictions=float(evictions))
    return told


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' EarlyStopping on several ranks: all stop after the same epoch, by the mean of `monitor` over ranks.

    Keras' own decides on every rank by what that rank has measured, and the first to stop leaves the others waiting in
    the next exchange. Ranks without the number (no validation data: nan, or no log) do not count.

    Args:
      as Keras'.

    Raises:
      ValueError: restore_best_weights, which would bring back dense weights, but no row of a table.
    """

    def __init__(self, monitor: str = "val_loss", *args: Any, **kwargs: Any):
        super().__init__(monitor, *args, **kwargs)
        if self.restore_best_weights:
            raise ValueError(
                "restore_best_weights would restore dense weights and leave the tables as they are. Remedy: "
                "callbacks.Checkpoint, and the checkpoint of the best epoch."
            )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, mean_over_ranks(logs, self.monitor))


def mean_over_ranks(logs: Mapping[str, Any] | None, monitor: str) -> dict[str, Any]:
    """The logs with the mean of `monitor` over the ranks that have measured it; empty where none has. Collective."""
    mine = float((logs or {}).get(monitor, np.nan))
    values = collectives.all_gather(np.array([mine], np.float64))
    known = values[~np.isnan(values)]
    return {**(logs or {}), monitor: known.mean()} if len(known) else {}
