"""A job of benchmarks.schedule_quality that is killed in an epoch ends as an uninterrupted one, on two ranks."""

import json
import os
import pathlib
import signal

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.schedule_quality import job, splits
from models.experiment import from_dict
from models.prepare import prepare_data
from tests.models import experiments
from tests.support.ranks import RanksFailed, run_ranks

RANKS, EPOCHS, KILLED_IN = 2, 6, 3


def request_of(folder):
    """The arguments of job.on_rank without its folder, with dropout."""
    fields = {**experiments.RETRIEVAL, "model": {**experiments.RETRIEVAL["model"], "dropout": 0.2}}
    fields["train"] = {**experiments.RETRIEVAL["train"], "epochs": EPOCHS}
    fields["embedding"] = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    experiment = from_dict(fields)
    test = prepare_data(experiment, folder)
    validation = splits.validation_of(test, folder / "validation")
    of_splits = {"validation": str(validation), "test": str(test)}
    return {"experiment": experiment.to_dict(), "splits": of_splits, "patience": EPOCHS}


def train(folder, request, killed_in):
    """Runs or resumes the job. Its ranks end without a warning at the second step of the epoch `killed_in`."""
    harness.commit = lambda: ""  # it would run git as a process
    begun = []
    on_epoch_begin = job.Progress.on_epoch_begin

    def on_epoch_begin_of(self, epoch, logs=None):
        begun.append(epoch)
        on_epoch_begin(self, epoch, logs)

    def on_train_batch_end(self, batch, logs=None):
        if begun[-1] == killed_in and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    job.Progress.on_epoch_begin, job.Progress.on_train_batch_end = on_epoch_begin_of, on_train_batch_end
    job.on_rank(str(folder), **request)
    return begun


def written(folder):
    """Returns the curve without its times, and the samples of the best epoch."""
    curve = json.loads((folder / "curve.json").read_text(encoding="utf-8"))
    with np.load(folder / "samples.npz") as file:
        samples = {name: file[name] for name in file.files}
    return [{**entry, "seconds": 0, "processor_seconds": 0} for entry in curve], samples


@pytest.mark.nightly
def test_a_killed_job_resumes_to_the_same_result(tmp_path):
    request = request_of(tmp_path / "data")
    whole, killed = (pathlib.Path(tmp_path / name) for name in ("whole", "killed"))
    for folder in (whole, killed):
        folder.mkdir()
    run_ranks(train, RANKS, timeout_s=900, folder=whole, request=request, killed_in=None)
    curve, samples = written(whole)
    assert [entry["epoch"] for entry in curve] == list(range(1, EPOCHS + 1)) and curve[0]["loss"] > curve[-1]["loss"]
    with pytest.raises(RanksFailed):
        run_ranks(train, RANKS, timeout_s=900, folder=killed, request=request, killed_in=KILLED_IN)
    assert len(written(killed)[0]) == KILLED_IN and not (killed / "result.json").exists()
    begun = run_ranks(train, RANKS, timeout_s=900, folder=killed, request=request, killed_in=None)
    assert begun[0][0] in (KILLED_IN - 1, KILLED_IN), "a save in the background may lack the last epoch"
    resumed, same_samples = written(killed)
    assert resumed == curve
    for name, values in samples.items():
        np.testing.assert_array_equal(same_samples[name], values)
    results = [json.loads((folder / "result.json").read_text(encoding="utf-8")) for folder in (whole, killed)]
    assert results[0]["epoch"] == results[1]["epoch"] and results[0]["test"] == results[1]["test"]
