"""Keras callbacks that monitor training on several ranks: metrics of tables and exchanges, and early stopping.

All ranks must fit with the same list; then they log the same values and decide the same. A working order is
Throughput, ModelFlopsUtilization, EmbeddingMetrics, Keras' TensorBoard on rank 0, EarlyStopping.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.checkpoint import dense
from tf_fusedrec.embedding import FusedEmbedding, embeddings_of
from tf_fusedrec.exchange import collectives, gradient_accumulation
from tf_fusedrec.tables.keras_savers import states_of

# Ends of metrics' names, before a cutoff such as @10.
_HIGHER = re.compile(r"(^|_)(acc|accuracy|g?auc|precision|recall|ndcg|mrr|hr|hit_?rate)(@?_?\d+)?$")
_LOWER = re.compile(r"(^|_)(loss|logloss|error|entropy|mse|mae|rmse|ne)(_\d+)?$")
_COUNTS = ("hits", "inserts", "refused", "evictions", "left_out")


class EmbeddingMetrics(keras.callbacks.Callback):
    """Adds metrics of the tables and exchanges of all ranks to the logs of every epoch. Collective.

    The logs have totals over all tables. Keras shows them in the progress bar and the history. A metric that is not
    available is missing:

      table_rows       rows at the end of the epoch
      table_growth     rows at the end minus rows at the beginning of the epoch
      table_hit_rate   fraction of the distinct ids of training lookups that had a row            (backend "native")
      table_evictions  evicted rows                                                              (backend "native")
      table_left_out   rows left out of updates because their gradients were not finite          (backend "native")
      dedup_ratio      ids requested by features over ids sent (several ranks, or pooled features)
      all_to_all_bytes mean bytes of ids, rows and gradients that a rank sends per training step (several ranks)
      exposed_ms       milliseconds of the median step of `timeline` during which an exchange ran and no op

    TensorBoard writes logs as scalars "epoch_<name>". For each table T, `directory` has the scalars "epoch_rows/T",
    "epoch_growth/T", "epoch_hit_rate/T", "epoch_evictions/T" and "epoch_left_out/T".

    Each replica of a table (Topology) is counted.

    Args:
      embedding: FusedEmbedding layer to monitor.
      timeline: Timeline callback of the same fit; None: no exposed_ms.
      directory: Folder of rank 0's scalars of each table, such as a folder inside TensorBoard's; None writes none.
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
        total = np.sum([rows for rows, _ in tables.values()]), np.sum([counts for _, counts in tables.values()], axis=0)
        logs.update({f"table_{name}": value for name, value in _metrics(*total).items()})
        self._write(epoch, tables)
        requested, sent, sent_bytes = now["traffic"] - self._before["traffic"]
        if sent:
            logs["dedup_ratio"] = float(requested) / float(sent)
        if sent_bytes:
            logs["all_to_all_bytes"] = float(sent_bytes) / (collectives.size() * max(self._steps, 1))
        exposed = self._exposed_ms()
        if exposed is not None:
            logs["exposed_ms"] = exposed

    def _write(self, epoch: int, tables: Mapping[str, tuple[int, np.ndarray]]) -> None:
        if self._writer is None:
            return
        with tf.summary.record_if(True), self._writer.as_default(step=epoch):
            for name, counts in tables.items():
                for metric, value in _metrics(*counts).items():
                    tf.summary.scalar(f"epoch_{metric}/{name}", value)
        self._writer.flush()

    def _tables(self) -> list[str]:
        return [name for lookup in self._embedding.lookups for name in lookup.table.names]

    def _counted(self) -> dict[str, np.ndarray]:
        """Sums over all ranks since training began: by table, its rows and _COUNTS; and "traffic"."""
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
        mine = [step.exposed_ms for step in self._timeline.steps]  # Only rank 0 records.
        recorded = collectives.all_gather_object(mine)[0]
        return float(np.median(recorded)) if recorded else None


def _metrics(rows: int, counts: np.ndarray) -> dict[str, float]:
    """Metrics of one table or of all tables, by name.

    Args:
      rows: Rows at the end of the epoch.
      counts: <int64>[1 + len(_COUNTS)], the epoch's growth and counts.
    """
    growth, hits, inserts, refused, evictions, left_out = counts
    metrics = {"rows": float(rows), "growth": float(growth)}
    if looked_up := hits + inserts + refused:
        metrics.update(hit_rate=float(hits / looked_up), evictions=float(evictions), left_out=float(left_out))
    return metrics


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' EarlyStopping for several ranks: all stop after the same epoch, by the mean of `monitor` over ranks.

    Keras' own callback decides per rank by that rank's value. The first rank to stop would leave the others waiting in
    the next exchange. Ranks whose value is missing or nan, such as ranks without validation data, do not count.

    Args:
      monitor, *args, **kwargs: Arguments of keras.callbacks.EarlyStopping. mode "auto" knows metrics of ranking, too.
      restore_best: True to end training with the model of the best epoch: dense weights, their optimizer, rows and
        slots. Every rank keeps a copy of its part in memory; callbacks.Checkpoint(restore_best=True) keeps it on disk.

    Raises:
      ValueError: restore_best_weights is set; it would restore dense weights, but no row of a table.
    """

    def __init__(self, monitor: str = "val_loss", *args: Any, restore_best: bool = False, **kwargs: Any):
        super().__init__(monitor, *args, **kwargs)
        if self.restore_best_weights:
            raise ValueError(
                "restore_best_weights would restore dense weights and leave the tables as they are. Remedy: "
                "restore_best=True, or callbacks.Checkpoint(save_best=True, restore_best=True)."
            )
        if len(args) < 4 and kwargs.get("mode", "auto") == "auto" and higher_is_better(monitor):
            self.monitor_op, self.min_delta = np.greater, abs(kwargs.get("min_delta", args[0] if args else 0))
        self._restore_best = restore_best
        self._copy: tuple[dense.State, list[Any]] | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._copy = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        before = self.best
        super().on_epoch_end(epoch, mean_over_ranks(logs, self.monitor))
        if self._restore_best and self.best != before:
            self._copy = None  # Memory has room for one copy.
            self._finish_updates()
            weights = dense.state(self.model, self.model.optimizer)
            self._copy = weights, [state.copied() for state in states_of(self.model)]

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if self._copy is None:
            return
        self._finish_updates()
        (weights, tables), self._copy = self._copy, None
        dense.put_back(weights)
        for state, rows in zip(states_of(self.model), tables):
            state.put_back(rows)
        gradient_accumulation.forget(self.model.optimizer)

    def _finish_updates(self) -> None:
        """Makes the updates that a schedule still holds, and replicas equal. Collective."""
        if hasattr(self.model, "drain"):
            self.model.drain()
        for embedding in embeddings_of(self.model):
            embedding.synchronize()


def higher_is_better(monitor: str) -> bool | None:
    """Whether the best value of a metric is its highest, by the end of its name; None for an unknown name."""
    return True if _HIGHER.search(monitor) else False if _LOWER.search(monitor) else None


def mean_over_ranks(logs: Mapping[str, Any] | None, monitor: str) -> dict[str, Any]:
    """The logs with the mean of `monitor` over the ranks that measured it; empty if no rank did. Collective."""
    mine = float((logs or {}).get(monitor, np.nan))
    values = collectives.all_gather(np.array([mine], np.float64))
    known = values[~np.isnan(values)]
    return {**(logs or {}), monitor: known.mean()} if len(known) else {}
