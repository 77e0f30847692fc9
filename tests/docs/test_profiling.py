"""The commands by which benchmarks/README.md profiles a job find a thread that spins."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT, commands

SHOWN = [line for line in commands(ROOT / "benchmarks/README.md") if re.match("pgrep|top|timeout|perf", line)]
SPINNING = """
import os, threading, time
def spin():
    while True:
        os.getppid()  # a call that keeps its share of a core on a busy machine, as sched_yield does not
threading.Thread(target=spin, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def spinning():
    with subprocess.Popen([sys.executable, "-c", SPINNING], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        yield child
        child.kill()


def ran(beginning, folder, pid=0):
    """Returns the output of the page's command with this beginning, with one second in place of ten."""
    (command,) = [line for line in SHOWN if line.startswith(beginning)]
    tool = next(word for word in ("strace", "perf", "pgrep", "top") if word in command)
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = command.replace(" 10 ", " 1 ").replace("sleep 10", "sleep 1")
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PID": str(pid)}, capture_output=True,
        encoding="utf-8", errors="replace", timeout=60,
    ).stdout  # fmt: skip


def test_the_processes_of_the_ranks_are_found():
    (command,) = [line for line in SHOWN if line.startswith("pgrep")]
    pattern = re.search("'(.*)'", command)[1]
    rank = "/usr/bin/python3 -m tf_fusedrec.cli.main train grm_tiny"
    assert re.search(pattern, rank) and re.search(pattern, "python3.11 -m tf_fusedrec.cli.main train")
    for other in (f"/bin/sh -c env HOROVOD_RANK=0 {rank}", "/usr/bin/python /usr/bin/fusedrec train -n 2"):
        assert not re.search(pattern, other)


def test_top_lists_it(spinning, tmp_path):
    second = ran("top", tmp_path, spinning.pid).split("\ntop - ")[1]
    rows = [line.split() for line in second.splitlines() if re.match(r" *\d+ \w+ ", line)]
    (share,) = [float(row[8]) for row in rows if int(row[0]) != spinning.pid]
    assert share > 2  # share of a core, on a machine that may be busy


def test_strace_counts_its_calls(spinning, tmp_path):
    ran("timeout", tmp_path, spinning.pid)
    counts = (tmp_path / "syscalls.txt").read_text(encoding="utf-8")
    if not counts:
        pytest.skip("strace may not attach here")
    calls = re.search(r" (\d+) +(?:\d+ )?getppid$", counts, re.MULTILINE)
    assert int(calls[1]) > 100


def test_perf_names_its_function(spinning, tmp_path):
    ran("perf record", tmp_path, spinning.pid)
    if not (tmp_path / "rank.perf").exists():
        pytest.skip("perf may not record here")
    assert re.search(r"\d+:python.*getppid", ran("perf report", tmp_path))
