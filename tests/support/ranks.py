"""Runs a function in real Horovod processes on this machine, for the distributed tests.

A body is a function `body(**kwargs)` of an importable test module. Each rank is a fork of a process that has imported
TensorFlow and not used it (multiprocessing's fork server), which saves the import. TensorFlow survives a fork only that
early. Results come back pickled, by rank. tests/support/launched.py starts ranks with horovodrun instead.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest
from horovod.runner import gloo_run
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from tools.object_cache import Output

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PRELOADED = ("tf_fusedrec", "tf_fusedrec.tfra", "horovod.tensorflow", "pytest")
_messages: Any = None  # folder of an emulated NCCL
_TO_END_S = 20  # Seconds that a rank has to end after another rank's failure or the time limit.

_processes: ForkServerContext = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(list(_PRELOADED))


class RanksFailed(AssertionError):
    """At least one rank failed. `output` is the output of all ranks."""

    def __init__(self, message: str, output: str):
        super().__init__(f"{message}\n{output}")
        self.output = output


def environment_of_ranks(given: Mapping[str, str]) -> dict[str, str]:
    """Adds the environment of all tests' ranks to `given`. Thread pools have one thread, so that ranks share cores."""
    return {**given, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def write_job(
    folder: pathlib.Path, body: Callable[..., Any], topologies: Sequence[Any], timeline: bool, kwargs: Mapping
) -> pathlib.Path:
    """Writes the file with a rank's job."""
    job = folder / "job.pkl"
    job.write_bytes(pickle.dumps((body.__module__, body.__qualname__, topologies, timeline, kwargs)))
    return job


def do_job(job: pathlib.Path) -> None:
    """Joins the other ranks, runs the body and writes its result beside the job file."""
    import tf_fusedrec

    module, name, topologies, timeline, kwargs = pickle.loads(job.read_bytes())
    tf_fusedrec.init(*topologies, timeline=timeline)
    rank = tf_fusedrec.rank()  # a body may leave Horovod
    result = getattr(importlib.import_module(module), name)(**kwargs)
    (job.parent / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))


def choose_exchange(name: str, patch: pytest.MonkeyPatch) -> None:
    """Sets the engine of the exchange for ranks that start later, or skips the test. NCCL is emulated."""
    from tf_fusedrec.exchange import gloo

    if name != "horovod" and not gloo.LIBRARY_PATH.exists():
        pytest.skip("built without Gloo's sources")
    patch.setenv("FUSEDREC_EXCHANGE", name)
    if name == "nccl":
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra"]
        emulation = Output(ROOT, command, [pathlib.Path("tests/exchange/nccl_emulation.cc")], ".so").make()
        patch.setenv("FUSEDREC_NCCL_LIBRARY", str(emulation))
        folder = tempfile.TemporaryDirectory()
        patch.setenv("FUSEDREC_TEST_NCCL_FOLDER", folder.name)
        patch.setattr(sys.modules[__name__], "_messages", folder)  # removed with the patch


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the error of a call for the result of a rank, such as "ValueError: ...", or "" without an error."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def read_results(job: pathlib.Path, world_size: int) -> list[Any]:
    """Returns the results of an ended job, by rank."""
    return [pickle.loads((job.parent / f"result-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    timeout_s: float = 240,
    topologies: Sequence[Any] = (),
    timeline: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Returns the results of `body(**kwargs)` by rank, from world_size new processes that tf_fusedrec.init has joined.

    Raises:
      RanksFailed: A rank raised, or the ranks did not end within timeout_s seconds.
    """
    rendezvous = RendezvousServer()
    with _turn_of(world_size), tempfile.TemporaryDirectory() as folder:
        job = write_job(pathlib.Path(folder), body, topologies, timeline, kwargs)
        output = job.with_name("output.txt")
        slots = get_host_assignments(parse_hosts(f"localhost:{world_size}"), world_size)
        port = rendezvous.start()
        try:
            rendezvous.init(slots)
            shared = environment_of_ranks(os.environ)
            if world_size > 1:
                shared.update({k: str(v) for k, v in gloo_run.create_run_env_vars("127.0.0.1", ["lo"], port).items()})
            ranks = [
                _processes.Process(
                    target=_rank,
                    args=(job, output, shared | (gloo_run.create_slot_env_vars(slot) if world_size > 1 else {})),
                )
                for slot in slots
            ]
            for rank in ranks:
                rank.start()
            late = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            threading.Thread(target=rendezvous.stop).start()  # which waits half a second for its server
        printed = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        if late:
            raise RanksFailed(f"{world_size} ranks did not end within {timeout_s} s", printed)
        if any(rank.exitcode for rank in ranks):
            raise RanksFailed(f"{world_size} ranks ended with exit codes {[rank.exitcode for rank in ranks]}", printed)
        return read_results(job, world_size)


@contextlib.contextmanager
def _turn_of(world_size: int) -> Iterator[None]:
    """Waits until no other worker runs more than two ranks, which would slow both jobs on two cores."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        if world_size > 2:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _wait(ranks: Sequence[ForkServerProcess], until: float) -> bool:
    """Waits for all ranks, and ends them by force after a failure or at `until`. Returns whether time ran out."""
    try:
        while True:
            running = [rank for rank in ranks if rank.exitcode is None]
            if not running or any(rank.exitcode for rank in ranks):
                return False
            if not connection.wait([rank.sentinel for rank in running], max(0.0, until - time.monotonic())):
                return True
    finally:
        for end in (ForkServerProcess.terminate, ForkServerProcess.kill):
            for rank in ranks:
                if rank.exitcode is None:
                    end(rank)
            for rank in ranks:
                rank.join(_TO_END_S)


def _rank(job: pathlib.Path, output: pathlib.Path, environment: Mapping[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    gc.freeze()  # The preloaded modules stay, so that no collection need visit their objects.
    gc.set_threshold(50_000, 20, 100)  # as in tests/conftest.py
    try:
        do_job(job)
        atexit._run_exitfuncs()  # as at the end of a program; a process of multiprocessing has none
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
