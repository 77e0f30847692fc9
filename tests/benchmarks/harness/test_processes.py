"""The processes of a benchmark end with it: after SIGTERM, after an error, and after SIGKILL."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.harness import network, processes

ROOT = pathlib.Path(__file__).resolve().parents[3]
WHY_NOT = network.why_not()

SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]
FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
PROGRAM = f"""
import contextlib, sys
from benchmarks.harness import harness
from benchmarks.harness import network
from benchmarks.harness import processes
def main():
    with network.namespace() if sys.argv[1] == "namespace" else contextlib.nullcontext("none") as name:
        inside = [] if name == "none" else network.inside(name, [])
        with processes.started([*inside, sys.executable, "-c", {FAMILY + "; time.sleep(300)"!r}]):
            print(name, flush=True)
harness.run(main)
"""


def begin(command, wanted):
    """Starts a process. Returns it and its descendants once `wanted(descendant)` holds for two of them."""
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8", errors="replace",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and program.poll() is None:
        family = psutil.Process(program.pid).children(recursive=True)
        with_name = []
        for one in family:
            try:
                with_name += [one] * wanted(one)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if len(with_name) >= 2:
            return program, family
        time.sleep(0.1)
    program.kill()
    raise AssertionError("the program did not start its children")


def sleeps(process):
    return "time.sleep" in " ".join(process.cmdline())


def are_gone(family, within_s):
    gone, left = psutil.wait_procs(family, timeout=within_s)
    for one in left:
        one.kill()
    return not left


@pytest.mark.parametrize(
    "where",
    ["here", pytest.param("namespace", marks=pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)))],
)
def test_sigterm_ends_children_and_removes_the_namespace(where):
    program, family = begin([sys.executable, "-c", PROGRAM, where], sleeps)
    name = program.stdout.readline().strip()
    program.terminate()
    assert program.wait(timeout=60) == 128 + signal.SIGTERM
    assert are_gone(family, 10)
    if where == "namespace":
        listed = subprocess.check_output(["ip", "netns", "list"], encoding="utf-8", errors="replace")
        assert name.startswith("fusedrec-") and name not in listed


def test_a_killed_benchmark_takes_its_child_along():
    program, family = begin([sys.executable, "-c", PROGRAM, "here"], sleeps)
    child = next(one for one in family if one.ppid() == program.pid)
    program.kill()
    assert are_gone([child], 10)
    are_gone(family, 0)


def test_an_error_in_the_body_ends_the_child():
    with (
        pytest.raises(ZeroDivisionError),
        processes.started([sys.executable, "-c", "import time; time.sleep(300)"]) as it,
    ):
        1 / 0  # noqa: B018
    assert it.poll() is not None


def test_output_and_exit_code_of_a_child_are_returned():
    done = processes.run([sys.executable, "-c", "import sys; print('said'); sys.exit(3)"])
    assert (done.stdout, done.returncode) == ("said\n", 3)


@pytest.mark.parametrize("benchmark", ["all_to_all_padding", "topology"], ids=["on_ranks", "ask_ranks"])
def test_sigterm_ends_a_benchmark_and_its_ranks(benchmark):
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick"]
    program, family = begin(command, lambda one: "HOROVOD_RANK" in one.environ())
    program.terminate()
    assert program.wait(timeout=60) == 128 + signal.SIGTERM
    assert are_gone(family, 20)
