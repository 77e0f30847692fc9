"""Trainings as jobs of a run: a folder for each, and processes that train the unfinished ones, one for each core."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import children, harness, processes, training_job
from benchmarks.harness.content import content_of
from models.compare import read_samples
from models.experiment import Experiment

LOG = "log.txt"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}  # the jobs share the cores


class Job(NamedTuple):
    """One training."""

    folder: pathlib.Path
    request: dict[str, Any]  # arguments of training_job.main, without the folder

    @property
    def finished(self) -> bool:
        return (self.folder / training_job.RESULT).exists()

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the entries of a finished job, one for each trained epoch."""
        return json.loads((self.folder / training_job.RESULT).read_text(encoding="utf-8"))

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
      deciding, patience: See training_job.Progress.
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

    Args:
      tried: Settings, each with its finished tuning jobs, one for each seed.
    """
    entries = [(setting, [job.epochs() for job in jobs]) for setting, jobs in tried]
    means = [(setting, [_mean(of_seeds) for of_seeds in zip(*epochs)]) for setting, epochs in entries]
    setting, epochs = max(means, key=lambda one: training_job.best(one[1])["score"])
    chosen = training_job.best(epochs)
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
    """Trains the unfinished jobs, `workers` at a time; by default as many as the cores that this process may use.

    Raises:
      CheckFailed: A job failed. The message ends with the last lines of its log.
    """
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
    command = [sys.executable, "-m", training_job.__name__, json.dumps({"folder": str(one.folder), **one.request})]
    environment = {**children.environment(), **ONE_THREAD}
    return stack.enter_context(
        processes.started(command, env=environment, cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT)
    )


def _check(one: Job, code: int) -> None:
    if code != 0 or not one.finished:
        last = (one.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        raise harness.CheckFailed(f"{one.folder} ended with code {code}:\n" + "\n".join(last))
    scores = [entry["score"] for entry in one.epochs() if "score" in entry]
    print(f"{one.folder.name}: " + " ".join(f"{value:.4f}" for value in scores), flush=True)
