"""Runs a small job of `fusedrec train` and reads its output."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import psutil
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]


def training(folder: pathlib.Path, fields: dict) -> list[str]:
    """Returns the arguments of `fusedrec train` for an experiment with the output folder `folder`/run."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return [str(config), "--output", str(folder / "run"), "--set", f"data.cache={folder / 'data'}"]


@contextlib.contextmanager
def running(ranks: int, *arguments: str) -> Iterator[subprocess.Popen]:
    """Yields the running `fusedrec train` with its output in one pipe, and kills its remaining processes at the end."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, "-m", "tf_fusedrec.cli.main", "train", *arguments, "-n", str(ranks)], cwd=ROOT,
        env=environment, encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield job
    finally:
        if job.poll() is None:
            for process in psutil.Process(job.pid).children(recursive=True):
                process.kill()
            job.kill()
        job.stdout.close()
        job.wait()


def output_of(folder: pathlib.Path, fields: dict, ranks: int, *arguments: str) -> tuple[int, str]:
    """Returns exit code and output of `fusedrec train`. A limit of 600 s ends a hanging job."""
    with running(ranks, *training(folder, fields), *arguments) as job:
        output = job.communicate(timeout=600)[0]
        return job.returncode, output


def read_until(job: subprocess.Popen, text: str) -> str:
    """Returns the job's output up to `text`, read by the character, because progress bars have no line ends."""
    seen = ""
    while text not in seen:
        character = job.stdout.read(1)
        assert character, f"the job ended without printing {text!r}:\n{seen}"
        seen += character
    return seen


def rank_processes(job: subprocess.Popen) -> dict[int, psutil.Process]:
    """Returns the processes of the job's ranks, by rank. Only ranks have HOROVOD_RANK in their environment."""
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            found[int(process.environ()["HOROVOD_RANK"])] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
            continue
    return found
