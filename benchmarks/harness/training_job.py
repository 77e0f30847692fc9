"""One job in a process of its own: trains an experiment and evaluates it on a held-out split.

Its folder gets result.json at the end, and samples.npz with the exposures or users of the last evaluation
(models.compare).
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import children
from models.base import TRAINING_PASSES
from models.build import columns, make_embedding, make_model, no_rows
from models.compare import SAMPLES
from models.evaluate import Evaluation, evaluator
from models.experiment import Experiment, from_dict
from models.fit_calls import fit_calls
from models.parts.dense_inputs import read_statistics
from tf_fusedrec import keras, tf
from tf_fusedrec.data import read_items

RESULT = "result.json"


def score(results: Mapping[str, float], deciding: Sequence[str]) -> float:
    """Returns the score that chooses settings and epochs: the mean of the deciding metrics. Larger is better."""
    return float(np.mean([results[name] for name in deciding]))


class Progress(keras.callbacks.Callback):
    """Evaluates the model after an epoch, and ends the training when the score stops improving.

    Args:
      evaluate: Evaluates the model on the held-out split.
      deciding: Metrics of the score.
      epochs: Largest number of epochs.
      patience: Epochs in a row without a better score after which the training ends. 0 trains all epochs and evaluates
        the last one only.
    """

    def __init__(self, evaluate: Callable[[], Evaluation], deciding: Sequence[str], epochs: int, patience: int):
        super().__init__()
        self._evaluate, self._deciding, self._epochs, self._patience = evaluate, deciding, epochs, patience
        self.entries: list[dict[str, Any]] = []
        self.last: Evaluation | None = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin = time.process_time()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        logs = logs or {}
        entry: dict[str, Any] = {"epoch": epoch + 1, "loss": float(logs["loss"])}
        entry["forward_mflops"] = 1e3 * float(logs["gflops"]) / TRAINING_PASSES / float(logs["samples"])  # of a row
        entry["processor_seconds"] = round(time.process_time() - self._begin, 1)
        if self._patience or epoch + 1 == self._epochs:
            self.last = self._evaluate()
            entry["held_out"] = self.last.results
            entry["score"] = score(self.last.results, self._deciding)
        self.entries.append(entry)
        print(json.dumps({name: value for name, value in entry.items() if name != "held_out"}), flush=True)
        if self._patience:
            since = epoch + 1 - best(self.entries)["epoch"]
            self.model.stop_training = since >= self._patience


def best(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the epoch with the best score; the first one of equals."""
    return max(entries, key=lambda entry: entry["score"])


def start(config: Experiment) -> None:
    """Initializes the process of a job. All that follows draws from the experiment's seed."""
    tf.get_logger().setLevel("ERROR")
    fr.init()
    keras.utils.set_random_seed(config.seed)


def made(
    config: Experiment, embedding: keras.layers.Layer, source: pathlib.Path, held_out: pathlib.Path | None = None
) -> tuple[keras.Model, Callable[[], Evaluation]]:
    """Returns the compiled model with its weights, and a function that evaluates it on a held-out split.

    Args:
      config: Experiment.
      embedding: Layer of the rows.
      source: Folder of the data set to train on.
      held_out: Folder of the data set whose part `test` is the held-out split. The default is `source`.
    """
    model = make_model(config, embedding, *read_items(source), read_statistics(config.model, source))
    adam = config.train
    model.compile(keras.optimizers.legacy.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon))
    model(no_rows(columns(config.model, "train")))  # creates the weights
    evaluate = evaluator(config, model)
    return model, lambda: evaluate(held_out or source)


def fit(model: keras.Model, config: Experiment, source: pathlib.Path, callback: keras.callbacks.Callback) -> None:
    """Trains the model on the data set of a folder for all epochs, or until the callback ends the training."""
    for call in fit_calls(config, source, None):
        model.fit(
            call.dataset, initial_epoch=call.epoch, epochs=call.end, steps_per_epoch=call.steps, callbacks=[callback],
            verbose=0,
        )  # fmt: skip


def main(
    folder: str, experiment: Mapping[str, Any], data: str, held_out: str, deciding: Sequence[str], patience: int
) -> list[dict[str, Any]]:
    """Trains the job. Returns the content of result.json, an entry for each epoch.

    Args:
      folder: Existing folder of the job.
      experiment: Fields of the experiment.
      data: Folder of the data set to train on.
      held_out: Folder of the data set whose part `test` is the held-out split.
      deciding, patience: See Progress.
    """
    config, place, source = from_dict(experiment), pathlib.Path(folder), pathlib.Path(data)
    start(config)
    model, evaluate = made(config, make_embedding(config), source, pathlib.Path(held_out))
    progress = Progress(evaluate, deciding, config.train.epochs, patience)
    fit(model, config, source, progress)
    if progress.last is not None:
        np.savez(place / SAMPLES, **progress.last.samples)
    partial = place / f"{RESULT}.partial"  # a job that is stopped here has no result
    partial.write_text(json.dumps(progress.entries, indent=1) + "\n", encoding="utf-8")
    partial.replace(place / RESULT)
    return progress.entries


if __name__ == "__main__":
    children.answer(main)
