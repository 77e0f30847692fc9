"""The learning curve of a run, and the figures of the JSON file."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import harness
from models.evaluate import evaluate
from models.experiment import Experiment
from models.experiment.model_config import RetrievalConfig
from models.parts.encoders import attends_by_time
from tf_fusedrec import keras

EVALUATE_EVERY = 5  # epochs; and after the last
_NAMES = ("hr_at_10", "ndcg_at_10", "hr_at_50", "hr_at_200")
# The paper's table 4, and a run of others with a stable sort of the interactions, as here.
PUBLISHED = {
    "hstu": {"paper": (0.3097, 0.1720, 0.5754, 0.7716), "others_with_stable_sort": (0.3227, 0.1879, 0.5894, 0.7858)},
    "hstu_large": {
        "paper": (0.3294, 0.1893, 0.5935, 0.7839),
        "others_with_stable_sort": (0.3642, 0.2164, 0.6194, 0.8031),
    },
    "sasrec": {"paper": (0.2853, 0.1603, 0.5474, 0.7528), "others_with_stable_sort": (0.2877, 0.1622, 0.5518, 0.7632)},
}
CAVEAT = (
    "The order of the interactions is exact, but a sixth of the timestamps (ratings of 3 stars) are estimates in this "
    "data set. In a test with hidden timestamps, 55 % of the estimates were exact, 95 % within 230 s, and 2.5 % off by "
    "more than a day."
)

COMPARISON = (
    "The paper gives figures of its best epoch on the test split, with an unstable sort. The others hold out one "
    "more item of every user for validation, so that they train on fewer items."
)
WITH_VALIDATION = (
    "The item before the last is held out of training and chooses the epoch, as with the others. The paper gives "
    "figures of its best epoch on the test split, with an unstable sort."
)


class Curve(keras.callbacks.Callback):
    """Writes the learning curve beside the checkpoint: loss and time of every epoch, metrics of the evaluated ones.

    It comes before callbacks.Checkpoint, so that an epoch that is trained again after a crash replaces its first entry.
    """

    def __init__(
        self,
        path: pathlib.Path,
        experiment: Experiment,
        splits: Mapping[str, pathlib.Path],
        done: int,
        report: Callable[[list[dict[str, Any]]], None],
    ):
        super().__init__()
        self._report = report  # runs after every evaluation
        self._path, self._experiment, self._splits = path, experiment, splits
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self.entries: list[dict[str, Any]] = [entry for entry in entries if entry["epoch"] <= done]

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        wall, processor = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        loss = float((logs or {})["loss"])
        entry: dict[str, Any] = {"epoch": epoch + 1, "loss": loss, "seconds": wall, "processor_seconds": processor}
        last = epoch + 1 == self._experiment.train.epochs
        if last or (epoch + 1) % EVALUATE_EVERY == 0:
            results, samples = evaluate(self._experiment, self.model, self._splits["test"])
            np.savez(self._path.with_name("samples.npz"), **samples)  # for models.compare
            entry |= _fields(results)
            if "validation" in self._splits:
                entry["validation"] = _fields(evaluate(self._experiment, self.model, self._splits["validation"])[0])
        self.entries.append(entry)
        partial = self._path.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(json.dumps(one) for one in self.entries) + "\n]\n", encoding="utf-8")
        partial.replace(self._path)
        if "hr_at_10" in entry:
            self._report(self.entries)
        shown = {name: value for name, value in entry.items() if name != "validation"}
        print(" ".join(f"{name} {value:.4g}" for name, value in shown.items()), flush=True)


def _fields(results: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("@", "_at_"): value for name, value in results.items() if "baseline" not in name}


def summary(name: str, experiment: Experiment, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of the JSON file: the figures of the best epoch on validation, or of the last one without.

    Args:
      name: Name of the model, a key of MODELS.
      experiment: Its experiment.
      entries: Entries of the curve.
    """
    evaluated = [entry for entry in entries if "hr_at_10" in entry]
    last, best = evaluated[-1], max(evaluated, key=lambda entry: entry["ndcg_at_10"])
    validated = "validation" in last
    shown = max(evaluated, key=lambda entry: entry["validation"]["ndcg_at_10"]) if validated else last
    model = experiment.model
    assert isinstance(model, RetrievalConfig)
    return {
        **{name: shown[name] for name in _NAMES},
        "best_epoch": shown["epoch"],
        "epochs": last["epoch"],
        "complete": last["epoch"] == experiment.train.epochs,
        "seconds_per_epoch": statistics.median(entry["seconds"] for entry in entries),
        "processor_seconds_per_epoch": statistics.median(entry["processor_seconds"] for entry in entries),
        "best_on_test": {"epoch": best["epoch"], **{name: best[name] for name in _NAMES}},
        "users": int(last["users"]),
        "model": name,
        "validation": validated,
        "position_bias": model.position_bias and model.encoder == "hstu",
        "time_bias": attends_by_time(model),
        "negatives": model.num_negatives,
        "expansion": model.expansion,
        "published": {source: dict(zip(_NAMES, figures)) for source, figures in PUBLISHED[name].items()},
        "note": CAVEAT + " " + (WITH_VALIDATION if validated else COMPARISON),
        "machine": harness.describe_machine(),
        "cores_used": len(os.sched_getaffinity(0)),
    }
