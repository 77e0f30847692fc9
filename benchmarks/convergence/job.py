"""One training in a process of its own: the metrics of the held-out split, every so many steps."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tf_fusedrec as fr
from benchmarks.harness import children
from models.build import columns, features, make_model, no_rows
from models.evaluate import evaluator
from models.experiment import Experiment, from_dict
from models.fit_calls import fit_calls
from models.parts.dense_inputs import read_statistics
from tf_fusedrec import keras, tf
from tf_fusedrec.data import read_items


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
    tf.get_logger().setLevel("ERROR")
    fr.init()
    keras.utils.set_random_seed(config.seed)
    model = make_model(config, layer(config, backend), *read_items(source), read_statistics(config.model, source))
    adam = config.train
    model.compile(keras.optimizers.legacy.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon))
    model(no_rows(columns(config.model, "train")))  # creates the weights
    held_out = evaluator(config, model)
    curve = Curve(lambda: held_out(source).results, every)
    for call in fit_calls(config, source, None):
        model.fit(
            call.dataset, initial_epoch=call.epoch, epochs=call.end, steps_per_epoch=call.steps, callbacks=[curve],
            verbose=0,
        )  # fmt: skip
    return curve.points


if __name__ == "__main__":
    children.answer(main)
