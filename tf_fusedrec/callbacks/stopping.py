"""Keras callbacks that end training on all ranks after the same step or epoch."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint import dense
from tf_fusedrec.embedding import embeddings_of
from tf_fusedrec.exchange import collectives, dense_gradients
from tf_fusedrec.tables.keras_savers import states_of

# Ends of metrics' names, before a cutoff such as @10.
_HIGHER = re.compile(r"(^|_)(acc|accuracy|g?auc|precision|recall|ndcg|mrr|hr|hit_?rate)(@?_?\d+)?$")
_LOWER = re.compile(r"(^|_)(loss|logloss|error|entropy|mse|mae|rmse|ne)(_\d+)?$")


class Interrupt(keras.callbacks.Callback):
    """Ends training on all ranks after one step when a rank gets SIGINT (Ctrl-C) or SIGTERM, or sets stop_training.

    An earlier callback may set stop_training on one rank, as keras.callbacks.TerminateOnNaN does. Ranks
    agree by an all-reduced flag after every step. Put this callback before Checkpoint, which then saves the last step.
    The previous signal handlers are restored after the first signal, and when training ends.

    Attributes:
      signal_name: After fit, the name of the signal, "another rank's signal" for a signal of another rank, or None.
      stops_all_ranks: True, which lets fit take a TerminateOnNaN before this callback.
    """

    stops_all_ranks = True
    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        super().__init__()
        self.signal_name: str | None = None
        self._received: str | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._handlers = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._restore()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        flags = tf.constant([self._received is not None, self.model.stop_training])
        signals, stops = collectives.all_reduce_sum(tf.cast(flags, tf.int32), name="fusedrec.interrupt").numpy()
        if signals:
            self.signal_name = self._received or "another rank's signal"
        self.model.stop_training = bool(signals or stops)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras' EarlyStopping for several ranks: all stop after the same epoch, by the mean of `monitor` over ranks.

    Keras' callback decides per rank, so the first rank to stop would leave the others hanging in the next exchange.
    Ranks with a missing value or NaN, such as ranks without validation data, do not count.

    Args:
      monitor, *args, **kwargs: Arguments of keras.callbacks.EarlyStopping. mode "auto" knows metrics of ranking, too.
      restore_best: True to end training with the model of the best epoch: dense weights, their optimizer, rows and
        slots. Every rank keeps a copy of its part in memory; callbacks.Checkpoint(restore_best=True) keeps it on disk.

    Raises:
      ValueError: restore_best_weights is set; it would restore dense weights, but no row of a table.
    """

    def __init__(self, monitor: str = "val_loss", *args: Any, restore_best: bool = False, **kwargs: Any):
        higher = higher_is_better(monitor)
        if len(args) < 4 and kwargs.get("mode", "auto") == "auto" and higher is not None:
            kwargs["mode"] = "max" if higher else "min"
        super().__init__(monitor, *args, **kwargs)
        if self.restore_best_weights:
            raise ValueError(
                "restore_best_weights would restore dense weights, but not the tables. Use restore_best=True, or "
                "callbacks.Checkpoint(save_best=True, restore_best=True)."
            )
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
        dense_gradients.forget(self.model.optimizer)

    def _finish_updates(self) -> None:
        """Applies pending updates of the schedule, and makes replicas equal. Collective."""
        if hasattr(self.model, "drain"):
            self.model.drain()
        for embedding in embeddings_of(self.model):
            embedding.synchronize()


def higher_is_better(monitor: str) -> bool | None:
    """Whether a metric is to be maximized, by the end of its name; None for an unknown name."""
    return True if _HIGHER.search(monitor) else False if _LOWER.search(monitor) else None


def mean_over_ranks(logs: Mapping[str, Any] | None, monitor: str) -> dict[str, Any]:
    """The logs with the mean of `monitor` over the ranks that measured it; empty if no rank did. Collective."""
    values = collectives.all_gather(np.array([(logs or {}).get(monitor, np.nan)], np.float64))
    measured = values[~np.isnan(values)]
    return {**(logs or {}), monitor: measured.mean()} if len(measured) else {}
