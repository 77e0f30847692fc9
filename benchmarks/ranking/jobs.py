"""The jobs of a run: a folder for each, and processes that train the unfinished ones, one for each core."""

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

from benchmarks.harness import children, harness, processes
from benchmarks.ranking import job
from benchmarks.ranking.data_sets import DataSet
from models.compare import read_samples

LOG = "log.txt"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}  # the jobs share the cores


class Job(NamedTuple):
    """One training."""

    folder: pathlib.Path
    request: dict[str, Any]  # arguments of job.main, without the folder

    @property
    def finished(self) -> bool:
        return (self.folder / job.RESULT).exists()

    def epochs(self) -> list[dict[str, Any]]:
        """Returns the entries of a finished job, one for each trained epoch."""
        return json.loads((self.folder / job.RESULT).read_text(encoding="utf-8"))

    def samples(self) -> dict[str, np.ndarray]:
        return read_samples(self.folder)


def job_of(
    data: DataSet, model: str, setting: Mapping[str, Any], epochs: int, seed: int, folder: pathlib.Path,
    run: pathlib.Path, patience: int = 0,
) -> Job:  # fmt: skip
    """Returns the job of a model. Jobs of other configurations or other data have other folders.

    Args:
      data: Kind of the data.
      model: One of data_sets.MODELS.
      setting: Fields of the experiment, such as {"model.dropout": 0.1}.
      epochs: Largest number of epochs.
      seed: Seed of weights, dropout and order.
      folder: Folder of the data set.
      run: Folder of the run.
      patience: See job.Progress.
    """
    overrides = [*(f"{name}={value}" for name, value in setting.items()), f"train.epochs={epochs}", f"seed={seed}"]
    experiment = data.experiment(model, overrides).to_dict()
    request = {"experiment": experiment, "tasks": list(data.tasks), "patience": patience}
    facts = json.dumps({**request, "data": folder.name}, sort_keys=True)
    key = hashlib.sha256(facts.encode()).hexdigest()[:12]
    kind = "tuning" if patience else f"seed{seed}"
    return Job(run / f"{model}_{kind}_{key}", {**request, "data": str(folder)})


def train(jobs: Sequence[Job], workers: int | None = None) -> None:
    """Trains the unfinished jobs, `workers` at a time; by default as many as there are cores.

    Raises:
      CheckFailed: A job failed. The message ends with the last lines of its log.
    """
    waiting = [one for one in jobs if not one.finished]
    running: list[tuple[Job, subprocess.Popen[str]]] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < (workers or os.cpu_count() or 1):
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
    command = [sys.executable, "-m", job.__name__, json.dumps({"folder": str(one.folder), **one.request})]
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
