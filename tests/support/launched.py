"""Runs a body (tests/support/ranks.py) in processes of another launcher, such as horovodrun."""

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.ranks import ROOT, RanksFailed, do_job, environment_of_ranks, read_results, write_job


def launch_ranks(
    launch: Sequence[str],
    environment: Mapping[str, str],
    body: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    topologies: Sequence[Any] = (),
    **kwargs: Any,
) -> list[Any]:
    """Runs a body like run_ranks, by a command that starts world_size processes on one file system.

    Raises:
      RanksFailed: A rank raised, or the ranks did not end within timeout_s seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(pathlib.Path(folder), body, topologies, False, kwargs)
        # horovodrun starts `python` from PATH.
        path = str(pathlib.Path(sys.executable).parent) + os.pathsep + environment["PATH"]
        try:
            done = subprocess.run(
                [*launch, sys.executable, "-m", "tests.support.launched", str(job)],
                env={**environment_of_ranks(environment), "PATH": path}, cwd=ROOT, timeout=timeout_s,
                encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode(errors="replace")
            raise RanksFailed(f"{world_size} ranks did not end within {timeout_s} s", output) from expired
        if done.returncode != 0:
            raise RanksFailed(f"{world_size} ranks ended with exit code {done.returncode}", done.stdout)
        return read_results(job, world_size)


if __name__ == "__main__":
    do_job(pathlib.Path(sys.argv[1]))
