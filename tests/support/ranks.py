"""Runs a function in real Horovod processes on this machine: what the distributed tests stand on.

A body is a function `body(**kwargs)` of an importable test module. Each rank is a fresh process (TensorFlow does not
survive fork) started by horovodrun, exactly as users start theirs; results come back pickled, by rank.
"""

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class RanksFailed(AssertionError):
    """At least one rank failed; `output` is what all of them printed."""

    def __init__(self, message: str, output: str):
        super().__init__(f"{message}\n{output}")
        self.output = output


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    # horovodrun starts `python` from PATH; one thread pool per rank would fight for two cores.
    bin_folder = str(pathlib.Path(sys.executable).parent)
    return {
        **given,
        "PATH": bin_folder + os.pathsep + given["PATH"],
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(
    body: Callable[..., Any], world_size: int, timeout_s: float = 240, topologies: Sequence[Any] = (), **kwargs: Any
) -> list[Any]:
    """Results of `body(**kwargs)` by rank, from world_size new processes that joined with these topologies.

    Raises:
      RanksFailed: a rank raised, or they did not end within timeout_s seconds.
    """
    launch = [] if world_size == 1 else ["horovodrun", "-np", str(world_size), "--gloo"]
    return launch_ranks(launch, os.environ, body, world_size, timeout_s, topologies, **kwargs)


def launch_ranks(
    launch: Sequence[str],
    environment: Mapping[str, str],
    body: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    topologies: Sequence[Any] = (),
    **kwargs: Any,
) -> list[Any]:
    """As run_ranks, by a launcher of one's own, which must start world_size processes that see one file system.

    Raises:
      RanksFailed: a rank raised, or they did not end within timeout_s seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = pathlib.Path(folder) / "job.pkl"
        job.write_bytes(pickle.dumps((body.__module__, body.__qualname__, topologies, kwargs)))
        child = [sys.executable, "-m", "tests.support.ranks", str(job)]
        try:
            done = subprocess.run(
                [*launch, *child], env=_environment(environment), cwd=ROOT, timeout=timeout_s,
                encoding="utf-8", errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode(errors="replace")
            raise RanksFailed(f"{world_size} ranks did not end within {timeout_s} s", output) from expired
        if done.returncode != 0:
            raise RanksFailed(f"{world_size} ranks ended with exit code {done.returncode}", done.stdout)
        return [pickle.loads((job.parent / f"result-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _child(job: pathlib.Path) -> None:
    import importlib

    import tf_fusedrec

    module, name, topologies, kwargs = pickle.loads(job.read_bytes())
    tf_fusedrec.init(*topologies)
    result = getattr(importlib.import_module(module), name)(**kwargs)
    (job.parent / f"result-{tf_fusedrec.collectives.rank()}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _child(pathlib.Path(sys.argv[1]))
