"""The files of examples/deploy: hadolint takes the Dockerfiles; the commands of Slurm and Kubernetes start ranks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.support.shared import ROOT
from tools import debian_root

FOLDER = ROOT / "examples/deploy"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
SLURM = FOLDER / "slurm.sh"
JOB = yaml.safe_load((FOLDER / "mpijob.yaml").read_text(encoding="utf-8"))
PYTHON_FOLDER = str(pathlib.Path(sys.executable).parent)
PROBE = [sys.executable, "-c", "import os; print('rank', os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'])"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=os.pathsep.join([PYTHON_FOLDER, os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not installed (requirements/dev.txt)")
    done = subprocess.run([hadolint, str(path)], capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_files_that_are_there(path):
    steps = debian_root.steps(path.read_text(encoding="utf-8"))
    assert [step.instruction for step in steps].count("FROM") == 2
    copied = [word for step in steps if step.instruction == "COPY" and "--from" not in step.words
              for word in step.words.split()[:-1]]  # fmt: skip
    assert copied and [word for word in copied if not (ROOT / word).exists()] == []


def with_programs(folder: pathlib.Path, **scripts: str) -> dict[str, str]:
    """Returns variables of an environment whose PATH begins with these programs."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": os.pathsep.join([str(folder), PYTHON_FOLDER, os.environ["PATH"]])}


def printed(command: list[str], env: dict[str, str]) -> list[str]:
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def ranks(lines: list[str]) -> list[str]:
    return sorted(found[1] for line in lines if (found := re.search(r"rank (\d+ \d+)$", line)))


def of_slurm(nodes: int, tasks: int) -> dict[str, str]:
    return {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "host[1-2]",
            "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_CPUS_PER_TASK": "1"}  # fmt: skip


def test_the_slurm_script_names_every_host_with_its_ranks(tmp_path):
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    env = with_programs(
        tmp_path,
        scontrol='[ "$*" = "show hostnames host[1-2]" ] && printf "host1\\nhost2\\n"',
        fusedrec='echo "$TF_NUM_INTRAOP_THREADS $*"',
    )
    (line,) = printed([str(SLURM), "run", "train.py"], {**env, **of_slurm(nodes=2, tasks=8)})
    assert line == "1 run -n 16 -H host1:8,host2:8 --network-interface eth0 train.py"


@pytest.mark.nightly
def test_the_slurm_script_starts_ranks(tmp_path):
    env = {**with_programs(tmp_path, scontrol="echo localhost"), **of_slurm(nodes=1, tasks=2), "NETWORK": "lo"}
    assert ranks(printed([str(SLURM), "run", *PROBE], env)) == ["0 2"]


@pytest.mark.nightly
def test_the_kubernetes_job_starts_its_ranks(tmp_path):
    """The launcher's command on this host: its own host file and network, and a program that prints the rank."""
    replicas = JOB["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    command = launcher["command"]
    count = JOB["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert command[:3] == ["fusedrec", "train", "grm_tiny"] and command[command.index("-n") + 1] == str(count)
    (tmp_path / "hostfile").write_text(f"localhost slots={count}\n", encoding="utf-8")
    here = {"/etc/mpi/hostfile": str(tmp_path / "hostfile"), "eth0": "lo"}
    started = ["fusedrec", "run", *(here.get(word, word) for word in command[3 : command.index("--output")])]
    assert len(set(here) & set(command)) == len(here)
    env = with_programs(tmp_path)
    assert ranks(printed([*started, *PROBE], env)) == [f"0 {count}"]  # rank 0 alone is shown
