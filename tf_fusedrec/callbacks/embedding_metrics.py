"""A Keras callback that adds metrics of tables and exchanges to the logs, before Keras' TensorBoard on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives

_COUNTS = ("hits", "inserts", "refused", "evictions", "left_out")


class EmbeddingMetrics(keras.callbacks.Callback):
    """Adds metrics of the tables and exchanges of all ranks to the logs of every epoch. Collective.

    The logs have totals over all tables, which Keras shows in the progress bar and the history. Metrics that are not
    available are missing:

      table_rows       rows at the end of the epoch
      table_growth     rows at the end minus rows at the beginning of the epoch
      table_hit_rate   fraction of the distinct ids of training lookups that had a row            (backend "native")
      table_evictions  evicted rows                                                              (backend "native")
      table_left_out   rows left out of updates because their gradients were not finite          (backend "native")
      dedup_ratio      ids requested by features over ids sent (several ranks, or pooled features)
      all_to_all_bytes mean bytes of ids, rows and gradients that a rank sends per training step (several ranks)
      exposed_ms       milliseconds of the median step of `timeline` during which an exchange ran and no op

    TensorBoard writes logs as scalars "epoch_<name>". For each table T, `folder` has the scalars "epoch_rows/T",
    "epoch_growth/T", "epoch_hit_rate/T", "epoch_evictions/T" and "epoch_left_out/T".

    Each replica of a table (Topology) is counted.

    Args:
      embedding: FusedEmbedding layer to monitor.
      timeline: Timeline callback of the same fit; None: no exposed_ms.
      folder: Folder of rank 0's scalars of each table, such as a folder inside TensorBoard's; None writes none.
    """

    def __init__(
        self,
        embedding: FusedEmbedding,
        timeline: Timeline | None = None,
        *,
        folder: str | os.PathLike | None = None,
    ):
        super().__init__()
        self._embedding, self._timeline = embedding, timeline
        self._before: tuple[dict[str, np.ndarray], np.ndarray] = {}, np.zeros(3, np.int64)
        self._steps = 0
        self._writer = None
        if folder is not None and collectives.rank() == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(folder))

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._before, self._steps = self._counted(), 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if logs is None:
            return
        before, traffic_before = self._before
        now, traffic = self._counted()
        tables = {name: (counts[0], counts - before[name]) for name, counts in now.items()}
        total = np.sum([rows for rows, _ in tables.values()]), np.sum([counts for _, counts in tables.values()], axis=0)
        logs.update({f"table_{name}": value for name, value in _metrics(*total).items()})
        self._write(epoch, tables)
        requested, sent, sent_bytes = traffic - traffic_before
        if sent:
            logs["dedup_ratio"] = float(requested) / float(sent)
        if sent_bytes:
            logs["all_to_all_bytes"] = float(sent_bytes) / (collectives.size() * max(self._steps, 1))
        if self._timeline is not None:  # only rank 0 records
            recorded = collectives.all_gather_object([step.exposed_ms for step in self._timeline.steps])[0]
            if recorded:
                logs["exposed_ms"] = float(np.median(recorded))

    def _write(self, epoch: int, tables: Mapping[str, tuple[int, np.ndarray]]) -> None:
        if self._writer is None:
            return
        with tf.summary.record_if(True), self._writer.as_default(step=epoch):
            for name, counts in tables.items():
                for metric, value in _metrics(*counts).items():
                    tf.summary.scalar(f"epoch_{metric}/{name}", value)
        self._writer.flush()

    def _counted(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Sums over all ranks since training began: by table, its rows and _COUNTS; and the traffic."""
        statistics = self._embedding.statistics()
        by_name = [[counts.get(count, 0) for count in ("keys", *_COUNTS)] for counts in statistics.values()]
        traffic = np.sum([group.traffic.numpy() for group in self._embedding.internals.groups], axis=0, dtype=np.int64)
        flat = np.concatenate([np.array(by_name, np.int64).ravel(), traffic])
        total = collectives.all_gather(flat[np.newaxis]).sum(axis=0)
        by_table = total[: -len(traffic)].reshape(-1, 1 + len(_COUNTS))
        return dict(zip(statistics, by_table)), total[-len(traffic) :]


def _metrics(rows: int, counts: np.ndarray) -> dict[str, float]:
    """Metrics by name, of rows at the end of an epoch, and its growth and counts <int64>[1 + len(_COUNTS)]."""
    growth, hits, inserts, refused, evictions, left_out = counts
    metrics = {"rows": float(rows), "growth": float(growth)}
    if looked_up := hits + inserts + refused:
        metrics.update(hit_rate=float(hits / looked_up), evictions=float(evictions), left_out=float(left_out))
    return metrics
