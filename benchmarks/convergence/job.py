"""One training in a process of its own: the metrics of the held-out split, every so many steps."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tf_fusedrec as fr
from benchmarks.harness import children
from benchmarks.harness.training_job import fit, made, start
from models.build import features
from models.experiment import Experiment, from_dict
from tf_fusedrec import keras


class Curve(keras.callbacks.Callback):
    """Evaluates the model before the first step, and after every `every` steps.

    Args:
      evaluate: Returns the metrics of the held-out split.
      every: Steps between two evaluations.
    """

    def __init__(self, evaluate: Callable[[], Mapping[str, float]], every: int):
        super().__init__()
        self._evaluate, self._every = evaluate, every
        self._steps = 0
        self.points: list[dict[str, float]] = []

    def _measure(self) -> None:
        self.points.append({"step": self._steps, **self._evaluate()})

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if not self.points:
            self._measure()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self._measure()


def layer(config: Experiment, backend: str) -> fr.FusedEmbedding:
    """Returns the embedding layer of an experiment with the rule adam. Keras' Adam trains the rows on both backends."""
    tables = []
    for table in config.tables:
        rule = table.optimizer
        adam = keras.optimizers.legacy.Adam(rule.learning_rate, rule.beta_1, rule.beta_2, rule.epsilon)
        tables.append(dataclasses.replace(table, optimizer=adam))
    return fr.FusedEmbedding(tables, features(config.model), seed=config.seed, backend=backend, key_encoding="hash")


def main(experiment: Mapping[str, Any], backend: str, every: int, data: str) -> list[dict[str, float]]:
    """Trains the experiment. Returns the points of the curve: step, and the held-out metrics by name.

    Args:
      experiment: Fields of the experiment.
      backend: Storage of rows, "native" or "tfra".
      every: Steps between two evaluations.
      data: Folder of the data set.
    """
    config, source = from_dict(experiment), pathlib.Path(data)
    start(config)
    model, evaluate = made(config, layer(config, backend), source)
    curve = Curve(lambda: evaluate().results, every)
    fit(model, config, source, curve)
    return curve.points


if __name__ == "__main__":
    children.answer(main)
