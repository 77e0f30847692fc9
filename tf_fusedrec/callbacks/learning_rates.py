"""Keras callbacks that change the learning rates of tables during fit, equally on all ranks.

Keras' LearningRateScheduler and ReduceLROnPlateau change the rate of the dense optimizer only. A rate that depends on
the number of updates needs no callback: TableConfig.optimizer takes a schedule of keras.optimizers.schedules.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, tf
from tf_fusedrec.callbacks.stopping import mean_over_ranks
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives
from tf_fusedrec.optimizers.rules import is_schedule


class TableLearningRate(keras.callbacks.Callback):
    """Sets learning rates of tables at the beginning of every epoch. Collective: rank 0 decides.

    Args:
      embedding: FusedEmbedding layer with the tables.
      schedule: Function from the epoch (the first is 0) and the current rate to the rate of the epoch.
      tables: Names of the tables; None for all. Tables of one group share a rate, so all of them must be named.

    Raises:
      ValueError: a table is unknown; only a part of a group is named; a rate follows a schedule.

    Examples:
      >>> halved = fr.callbacks.TableLearningRate(embedding, lambda epoch, rate: rate / 2)
      >>> plateau = fr.callbacks.ReduceLROnPlateau(embedding, "loss", factor=0.1, patience=5)
      >>> history = model.fit(x, y, batch_size=16, callbacks=[halved, plateau], verbose=0)
      >>> round(float(embedding.optimizers["item"].learning_rate), 3)
      0.05
    """

    def __init__(
        self, embedding: FusedEmbedding, schedule: Callable[[int, float], float], tables: Sequence[str] | None = None
    ):
        super().__init__()
        self._schedule, self._rates = schedule, _rates(embedding, tables)

    def on_epoch_begin(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        values = [float(self._schedule(epoch, float(rate.numpy()))) for rate in self._rates]
        for rate, value in zip(self._rates, collectives.all_gather_object(values)[0]):
            rate.assign(value)


class ReduceLROnPlateau(keras.callbacks.ReduceLROnPlateau):
    """Keras' ReduceLROnPlateau for several ranks and for tables: all rates drop in the same epoch by the same factor.

    The criterion is the mean of `monitor` over the ranks that measured it. Keras' callback decides per rank, so rates
    would diverge. `min_lr` bounds the rate of the dense optimizer; the rates of tables stay proportional to it.

    Args:
      embedding: FusedEmbedding layer with the tables.
      monitor, *args, **kwargs: Arguments of keras.callbacks.ReduceLROnPlateau.

    Raises:
      ValueError: the rate of a table follows a schedule.
    """

    def __init__(self, embedding: FusedEmbedding, monitor: str = "val_loss", *args: Any, **kwargs: Any):
        super().__init__(monitor, *args, **kwargs)
        self._rates = _rates(embedding, None)

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        before = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        super().on_epoch_end(epoch, mean_over_ranks(logs, self.monitor))
        after = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        if after != before:
            for rate in self._rates:
                rate.assign(rate * (after / before))
        if logs is not None:
            logs["lr" if KERAS_IS_LEGACY else "learning_rate"] = before  # as Keras names it


def _rates(embedding: FusedEmbedding, tables: Sequence[str] | None) -> list[tf.Variable]:
    """The variables with the rates of these tables, one per group."""
    all_names = {name for group in embedding.internals.groups for name in group.table.names}
    selected = all_names if tables is None else set(tables)
    if unknown := sorted(selected - all_names):
        raise ValueError(f"tables has {unknown}, want names of {sorted(all_names)}. Use only those.")
    rates = []
    for group in embedding.internals.groups:
        names = set(group.table.names)
        if not selected & names:
            continue
        if missing := sorted(names - selected):
            raise ValueError(
                f"tables lacks {missing}, which share the learning rate of {sorted(selected & names)} in one group. "
                "Use all of them, or give the tables different optimizers."
            )
        optimizer = group.table.optimizer
        rate = getattr(optimizer, "learning_rate", None)
        # Keras optimizers expose the current value of a schedule as a variable, too.
        if not isinstance(rate, tf.Variable) or is_schedule(getattr(optimizer, "_learning_rate", None)):
            raise ValueError(
                f"the learning rate of tables {group.table.names} cannot be set: it follows a schedule, or the "
                "optimizer has no learning rate. Use a number as the learning rate in TableConfig.optimizer."
            )
        rates.append(rate)
    return rates
