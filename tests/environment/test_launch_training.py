"""`make train` chooses the experiment for the data, prints readable output, and ends in order after Ctrl-C."""

import io
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.support.shared import ROOT
from tools import launch_training


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("ratings.dat", "configs/hstu_ml1m_tiny.yaml"),
        ("ratings.csv.gz", "configs/hstu_ml1m_tiny.yaml"),
        ("u.data", "configs/hstu_ml1m_tiny.yaml"),
        ("log.csv", "configs/grm_kuairand.yaml"),
        (None, launch_training.DEFAULT_CONFIG),
    ],
)
def test_the_data_set_chooses_the_experiment_unless_one_is_given(tmp_path, file, config):
    data = "" if file is None else str(tmp_path)
    for name in ("mine.yaml", *([file] if file else [])):
        (tmp_path / name).touch()
    assert launch_training.choose_config(data, "") == config and (ROOT / config).exists()
    assert launch_training.choose_config(data, str(tmp_path / "mine.yaml")) == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("data", "config", "words"),
    [
        ("nowhere", "", "DATA must be the folder of a data set, got 'nowhere'"),
        ("", "nothing.yaml", r"CONFIG must be .* got 'nothing.yaml'. Choose .*configs/grm_tiny.yaml"),
        ("{folder}", "", r"holds none of .*ratings.dat.*log.csv.*CONFIG=configs/"),
    ],
)
def test_bad_paths_are_named(tmp_path, data, config, words):
    with pytest.raises(ValueError, match=words):
        launch_training.choose_config(data.format(folder=tmp_path), config)


def test_one_process_needs_no_horovodrun_and_several_do():
    alone = launch_training.training_command(1, "-rf", "a.yaml")
    assert alone == [sys.executable, "-m", "tf_fusedrec.models.train", "--config=a.yaml", "--data=-rf"]
    launcher, *arguments = launch_training.training_command(2, "", "a.yaml")
    assert pathlib.Path(launcher).name == "horovodrun"
    assert arguments == ["-np", "2", "--gloo", "--disable-cache", *alone[:-1]]


def forwarded(text: bytes) -> bytes:
    """Returns the visible part of horovodrun's output."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as stream:
        stream.write(text)
    target, last = io.BytesIO(), []
    with os.fdopen(read, "rb") as source:
        launch_training.forward(source, target, last)
    return target.getvalue() + b"".join(last)


HOROVODRUN = b"Traceback (most recent call last):\n  File x\nRuntimeError: x\nProcess name: 1\nExit code: %d\n\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (  # The first rank shows as it is, the others are marked.
            b"[0]<stdout>:loss 1\n[1]<stderr>:bad\n[0]<stdout>:\r[0]<stdout>:step 2\nProcess 1 exit\n[12]<stdout>:end",
            b"loss 1\nrank 1: bad\n\rstep 2\nProcess 1 exit\nrank 12: end",
        ),
        (
            b"[1]<stderr>:ValueError: why\n" + HOROVODRUN % 3,
            b"rank 1: ValueError: why\nerror: rank 1 failed first: with exit code 3: ValueError: why\n",
        ),
        (
            b"[0]<stderr>:tf_fusedrec: rank 0 failed first: why\n[1]<stderr>:Horovod ends\n" + HOROVODRUN % 3,
            b"tf_fusedrec: rank 0 failed first: why\nrank 1: Horovod ends\nerror: rank 0 failed first: why\n",
        ),
        (
            b"[1]<stderr>:error: no column 'age'\n" + HOROVODRUN % 2,
            b"rank 1: error: no column 'age'\nerror: rank 1 failed first: no column 'age'\n",
        ),
        (
            b"[1]<stderr>:Killed\n" + HOROVODRUN % 137,
            b"rank 1: Killed\nerror: rank 1 failed first: it was ended by SIGKILL, as Linux does when memory runs out "
            b"(exit code 137)\n",
        ),
        (b"[1]<stdout>:saved\n" + HOROVODRUN % launch_training.INTERRUPTED, b"rank 1: saved\n"),
        *[(b"Traceback (most recent call last):\n  File x\nValueError: no network interface\n",) * 2],
    ],
)
def test_the_failed_rank_and_its_reason_stand_last_in_place_of_horovodruns_traceback(text, shown):
    assert forwarded(text) == shown


def test_a_killed_process_alone_is_named_with_its_signal(capfdbinary):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert launch_training.run([sys.executable, "-c", program]) == 139
    assert capfdbinary.readouterr().err == b"error: the process failed: it was ended by SIGSEGV (exit code 139)\n"


@pytest.mark.parametrize("chosen", [None, "7"])
def test_the_ranks_share_the_cores_unless_the_user_chose_the_threads(monkeypatch, capfdbinary, chosen):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.setattr(launch_training.os, "sched_getaffinity", lambda _: range(7))
    if chosen:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", chosen)
    program = "import os; print(os.environ['TF_NUM_INTRAOP_THREADS'])"
    assert launch_training.run([sys.executable, "-c", program], processes=2) == 0
    assert capfdbinary.readouterr().out == (chosen or "3").encode() + b"\n"


RANK = """
import sys, time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(130)
"""
STAND_IN_FOR_HOROVODRUN = f"""
import os, subprocess, sys
env = {{**os.environ, "HOROVOD_RANK": "0"}}
sys.exit(subprocess.run([sys.executable, "-c", {RANK!r}], env=env, start_new_session=True).returncode)
"""


@pytest.mark.parametrize(("processes", "job"), [(1, RANK), (2, STAND_IN_FOR_HOROVODRUN)])
def test_ctrl_c_reaches_the_ranks_and_waits_for_their_end(processes, job):
    program = (
        "import signal, sys; from tools import launch_training\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell started the tests with &
        f"sys.exit(launch_training.run([sys.executable, '-c', {job!r}], {processes}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as launcher:  # fmt: skip
        assert launcher.stdout.readline() == "started\n"
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=50)  # less than the rank sleeps
    assert (output, launcher.returncode) == ("saved\n", 130), errors
    assert "the ranks have 60 s to end by themselves" in errors
