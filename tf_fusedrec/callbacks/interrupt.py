"""A Keras callback that ends training on all ranks after the same step when any rank gets a signal."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives


class Interrupt(keras.callbacks.Callback):
    """Ends training on all ranks after the same step when any rank gets SIGINT (Ctrl-C) or SIGTERM.

    Ranks agree by an all-reduced flag after every step. Put this callback before Checkpoint, which then saves the last
    step. The previous signal handlers are restored after the first signal, and when training ends.

    Attributes:
      signal_name: After fit, the name of the signal, "another rank's signal" if it came elsewhere, or None.
    """

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
        flag = tf.constant(0 if self._received is None else 1, tf.int32)
        if int(collectives.all_reduce_sum(flag, name="fusedrec.interrupt")) > 0:
            self.signal_name = self._received or "another rank's signal"
            self.model.stop_training = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
