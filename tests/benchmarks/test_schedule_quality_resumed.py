"""A job of benchmarks.schedule_quality that is killed between epochs ends as an uninterrupted one, on two ranks."""

import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from benchmarks.harness import children, harness, processes
from benchmarks.schedule_quality import splits
from models.experiment import from_dict
from models.prepare import prepare_data
from tests.models import job as small_job

MODULE, RANKS, EPOCHS = "benchmarks.schedule_quality.job", 2, 8


@pytest.fixture(scope="module")
def request_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    fields = {**small_job.RETRIEVAL, "train": {**small_job.RETRIEVAL["train"], "schedule": "semi_async"}}
    fields["model"] = {**fields["model"], "dropout": 0.2}
    fields["embedding"] = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    fields["train"]["epochs"] = EPOCHS
    experiment = from_dict(fields)
    test = prepare_data(experiment, folder)
    validation = splits.validation_of(test, folder / "validation")
    of_splits = {"validation": str(validation), "test": str(test)}
    return {"experiment": experiment.to_dict(), "splits": of_splits, "patience": EPOCHS}


def trained(folder, request_of):
    """Runs or resumes the job. Returns its curve without times, and the samples of its best epoch."""
    children.ask_ranks(MODULE, RANKS, timeout_s=300, folder=str(folder), **request_of)
    curve = json.loads((folder / "curve.json").read_text(encoding="utf-8"))
    with np.load(folder / "samples.npz") as file:
        samples = {name: file[name] for name in file.files}
    return [{**entry, "seconds": 0} for entry in curve], samples


def kill_after(folder, request_of, epochs):
    """Starts the job and kills its processes without a warning when its curve has `epochs` epochs."""
    horovodrun = str(pathlib.Path(sys.executable).parent / "horovodrun")
    command = [horovodrun, "-np", str(RANKS), "--gloo", sys.executable, "-m", MODULE]
    with processes.started(
        [*command, json.dumps({"folder": str(folder), **request_of})],
        env=children.environment(), cwd=harness.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        curve, end = folder / "curve.json", time.monotonic() + 300
        while not curve.exists() or len(json.loads(curve.read_text(encoding="utf-8"))) < epochs:
            assert running.poll() is None and time.monotonic() < end, "the job ended before it could be killed"
            time.sleep(0.02)
        for process in [*psutil.Process(running.pid).children(recursive=True), running]:
            process.kill()
    assert not (folder / "result.json").exists(), "the job ended before it was killed"


def test_a_killed_job_resumes_to_the_same_result(request_of, tmp_path):
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    whole, samples = trained(folders[0], request_of)
    assert len(whole) == EPOCHS and whole[0]["loss"] > whole[-1]["loss"]
    kill_after(folders[1], request_of, 3)
    resumed, same_samples = trained(folders[1], request_of)
    assert resumed == whole
    for name, values in samples.items():
        np.testing.assert_array_equal(same_samples[name], values)
    # The job has ended, so the same call trains nothing and has the same result.
    (folders[1] / "result.json").unlink()
    assert trained(folders[1], request_of)[0] == whole
