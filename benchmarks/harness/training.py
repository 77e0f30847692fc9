"""Trainings as jobs of a run: a folder for each, and processes that train the unfinished ones, one for each core.

A job trains an experiment and evaluates it on a held-out split. Its folder gets result.json at the end, and samples.npz
with the exposures or users of the last evaluation (models.compare).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes
from models.base import TRAINING_PASSES
from models.build import columns, make_embedding, make_model, no_rows
from models.compare import SAMPLES, read_samples
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


class Curve(keras.callbacks.Callback):
    """Keeps an entry for each epoch: epoch, loss, seconds, processor_seconds, and what `measure` adds.

    It comes before callbacks.Checkpoint, so the file may be one epoch ahead of the checkpoint. `done` then drops that
    epoch, which is trained again.

    Args:
      path: File of the entries, which rank 0 writes after every epoch. None: no file.
      done: Number of epochs in the checkpoint.
    """

    def __init__(self, path: pathlib.Path | None = None, done: int = 0):
        super().__init__()
        self._path = path
        entries = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else []
        self.entries: list[dict[str, Any]] = [entry for entry in entries if entry["epoch"] <= done]

    def measure(self, entry: dict[str, Any], logs: Mapping[str, Any]) -> None:
        """Adds fields to the last of `entries`."""
        raise NotImplementedError

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        entry: dict[str, Any] = {"epoch": epoch + 1, "loss": float((logs or {})["loss"])}
        entry["seconds"] = time.perf_counter() - self._begin[0]
        entry["processor_seconds"] = round(time.process_time() - self._begin[1], 1)
        self.entries.append(entry)
        self.measure(entry, logs or {})
        if fr.collectives.rank() == 0:
            if self._path is not None:
                replace(self._path, "[\n" + ",\n".join(map(json.dumps, self.entries)) + "\n]\n")
            print(json.dumps({name: x for name, x in entry.items() if not isinstance(x, dict)}), flush=True)


class Progress(Curve):
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
        self.last: Evaluation | None = None

    def measure(self, entry: dict[str, Any], logs: Mapping[str, Any]) -> None:
        entry["forward_mflops"] = 1e3 * float(logs["gflops"]) / TRAINING_PASSES / float(logs["samples"])  # of a row
        if self._patience or entry["epoch"] == self._epochs:
            self.last = self._evaluate()
            entry["held_out"] = self.last.results
            entry["score"] = score(self.last.results, self._deciding)
        if self._patience:
            self.model.stop_training = entry["epoch"] - best(self.entries)["epoch"] >= self._patience


def best(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the epoch with the best score; the first one of equals."""
    return max(entries, key=lambda entry: entry["score"])


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file that is whole at every moment."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def start(config: Experiment) -> None:
    """Initializes the process of a job. All that follows draws from the experiment's seed."""
    tf.get_logger().setLevel("ERROR")
    fr.init()
    keras.utils.set_random_seed(config.seed)


def made(
    config: Experiment, embedding: keras.layers.Layer, source: pathlib.Path, held_out: pathlib.Path | None = None
) -> tuple[keras.Model, Callable[[], Evaluation]]:
    """Returns the compiled model with its weights, and a function that evaluates it on a held-out split."""
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


def train_job(
    folder: str, experiment: Mapping[str, Any], data: str, held_out: str, deciding: Sequence[str], patience: int
) -> list[dict[str, Any]]:
    """Trains the job. Returns the content of result.json, an entry for each epoch."""
    config, place, source = from_dict(experiment), pathlib.Path(folder), pathlib.Path(data)
    start(config)
    model, evaluate = made(config, make_embedding(config), source, pathlib.Path(held_out))
    progress = Progress(evaluate, deciding, config.train.epochs, patience)
    fit(model, config, source, progress)
    if progress.last is not None:
        np.savez(place / SAMPLES, **progress.last.samples)
    replace(place / RESULT, json.dumps(progress.entries, indent=1) + "\n")
    return progress.entries


@functools.cache
def content_of(folder: pathlib.Path) -> str:
    """Returns sixteen hexadecimal digits of a hash over all files of a data set: their paths in it and their bytes.

    Other runs and machines find the folder of a job by it.

    The folder's own name holds the time of the raw files (models.prepare), which a copy of the data does not keep.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


LOG = "log.txt"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}  # the jobs share the cores


class Job(NamedTuple):
    """One training."""

    folder: pathlib.Path
    request: dict[str, Any]  # arguments of train_job, without the folder

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the entries of a finished job, one for each trained epoch."""
        return json.loads((self.folder / RESULT).read_text(encoding="utf-8"))

    def samples(self) -> dict[str, np.ndarray]:
        return read_samples(self.folder)


def job_of(
    name: str, experiment: Experiment, folder: pathlib.Path, run: pathlib.Path, *, deciding: Sequence[str],
    held_out: pathlib.Path | None = None, patience: int = 0,
) -> Job:  # fmt: skip
    """Returns a job. Jobs of other configurations or other data have other folders.

    Args:
      name: Name of the model, for the folder.
      experiment: Experiment to train.
      folder: Folder of the data set to train on.
      run: Folder of the run.
      deciding, patience: See Progress.
      held_out: Folder of the data set whose part `test` is the held-out split. The default is `folder`.
    """
    held_out = held_out or folder
    request = {"experiment": experiment.to_dict(), "deciding": list(deciding), "patience": patience}
    facts = json.dumps({**request, "data": content_of(folder), "held_out": content_of(held_out)}, sort_keys=True)
    key = hashlib.sha256(facts.encode()).hexdigest()[:12]
    kind = "tuning" if patience else f"seed{experiment.seed}"
    return Job(run / f"{name}_{kind}_{key}", {**request, "data": str(folder), "held_out": str(held_out)})


def choice(tried: Sequence[tuple[Mapping[str, Any], Sequence[Job]]]) -> dict[str, Any]:
    """Returns setting, epochs and score of the best job on its held-out split, that split's metrics, and all scores.

    Scores and metrics are means over seeds. An epoch counts if all seeds have trained it.
    """
    entries = [(setting, [job.epochs() for job in jobs]) for setting, jobs in tried]
    means = [(setting, [_mean(of_seeds) for of_seeds in zip(*epochs)]) for setting, epochs in entries]
    setting, epochs = max(means, key=lambda one: best(one[1])["score"])
    chosen = best(epochs)
    return {
        "setting": setting,
        "epochs": chosen["epoch"],
        "score": chosen["score"],
        "validation": chosen["held_out"],
        "tried": [{**one, "scores": [round(entry["score"], 4) for entry in of]} for one, of in means],
    }


def _mean(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns epoch, mean score and mean metrics of one epoch that several seeds have trained."""
    held_out = [entry["held_out"] for entry in entries]
    return {
        "epoch": entries[0]["epoch"],
        "score": float(np.mean([entry["score"] for entry in entries])),
        "held_out": {metric: float(np.mean([one[metric] for one in held_out])) for metric in held_out[0]},
    }


def train(jobs: Sequence[Job], workers: int | None = None) -> None:
    """Trains the unfinished jobs, `workers` at a time; by default as many as the cores that this process may use."""
    waiting = [one for one in jobs if not one.finished]
    running: list[tuple[Job, subprocess.Popen[str]]] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < (workers or len(os.sched_getaffinity(0))):
                running.append((waiting[0], _start(waiting.pop(0), stack)))
            ended = [(one, process) for one, process in running if process.poll() is not None]
            running = [pair for pair in running if pair not in ended]
            for one, process in ended:
                _check(one, process.returncode)
            time.sleep(0.1)


def _start(one: Job, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    print(f"{one.folder.name} ...", flush=True)
    one.folder.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context((one.folder / LOG).open("w", encoding="utf-8"))
    command = processes.command_of(sys.executable, train_job, {"folder": str(one.folder), **one.request})
    environment = {**processes.environment(), **ONE_THREAD}
    return stack.enter_context(
        processes.started(command, env=environment, cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT)
    )


def _check(one: Job, code: int) -> None:
    if code != 0 or not one.finished:
        last = (one.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{one.folder} ended with code {code}:\n" + "\n".join(last))
    scores = [entry["score"] for entry in one.epochs() if "score" in entry]
    print(f"{one.folder.name}: " + " ".join(f"{value:.4f}" for value in scores), flush=True)
