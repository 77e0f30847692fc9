"""`make train` chooses the experiment for the data, prints readable output, and ends in order after Ctrl-C."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tools import launch_training

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("ratings.dat", "configs/hstu_ml1m_tiny.yaml"),
        ("ratings.csv.gz", "configs/hstu_ml1m_tiny.yaml"),
        ("u.data", "configs/hstu_ml1m_tiny.yaml"),
        ("log.csv", "configs/grm_kuairand.yaml"),
    ],
)
def test_the_data_set_chooses_the_experiment(tmp_path, file, config):
    (tmp_path / file).write_text("", encoding="utf-8")
    assert launch_training.choose_config(str(tmp_path), "") == config
    assert (ROOT / config).exists()


def test_without_data_the_default_and_a_given_config_wins(tmp_path):
    assert launch_training.choose_config("", "") == launch_training.DEFAULT_CONFIG
    assert (ROOT / launch_training.DEFAULT_CONFIG).exists()
    (tmp_path / "ratings.dat").write_text("", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    assert launch_training.choose_config(str(tmp_path), str(tmp_path / "mine.yaml")) == str(tmp_path / "mine.yaml")


def test_bad_paths_are_named(tmp_path):
    with pytest.raises(ValueError, match="DATA must be the folder of a data set, got 'nowhere'"):
        launch_training.choose_config("nowhere", "")
    with pytest.raises(ValueError, match=r"CONFIG must be .* got 'nothing.yaml'. Choose .*configs/grm_tiny.yaml"):
        launch_training.choose_config("", "nothing.yaml")
    with pytest.raises(ValueError, match=r"holds none of .*ratings.dat.*log.csv.*CONFIG=configs/"):
        launch_training.choose_config(str(tmp_path), "")


def forwarded(text: bytes) -> bytes:
    """Returns the visible part of horovodrun's output."""
    read, write = os.pipe()
    with os.fdopen(write, "wb") as stream:
        stream.write(text)
    target, last = io.BytesIO(), []
    with os.fdopen(read, "rb") as source:
        launch_training.forward(source, target, last)
    return target.getvalue() + b"".join(last)


def test_the_first_rank_shows_as_it_is_and_the_others_are_marked():
    text = (
        b"[0]<stdout>:loss 1\n[1]<stderr>:bad news\n[0]<stdout>:\r[0]<stdout>:step 2\nProcess 1 exit\n[12]<stdout>:end"
    )
    assert forwarded(text) == b"loss 1\nrank 1: bad news\n\rstep 2\nProcess 1 exit\nrank 12: end"


HOROVODRUNS_OWN = (
    b"Traceback (most recent call last):\n  File x\nRuntimeError: one or more\nProcess name: 1\nExit code: 3\n\n"
)


def test_the_message_of_a_failed_rank_is_not_hidden_by_horovodruns_traceback():
    told = b"[1]<stderr>:ValueError: the reason\n"
    assert forwarded(told + HOROVODRUNS_OWN) == (
        b"rank 1: ValueError: the reason\nerror: rank 1 failed first: with exit code 3: ValueError: the reason\n"
    )


def test_the_cause_stands_last_whichever_rank_ended_first():
    first = b"[0]<stderr>:tf_fusedrec: rank 0 failed first: ValueError: the reason\n"
    second = b"[1]<stderr>:Traceback of another rank\n[1]<stderr>:UnknownError: Horovod has been shut down\n"
    shown = forwarded(first + second + HOROVODRUNS_OWN)
    assert shown.endswith(b"error: rank 0 failed first: ValueError: the reason\n")
    assert b"RuntimeError: one or more" not in shown


def test_the_error_of_a_rank_is_repeated_as_it_is():
    shown = forwarded(b"[1]<stderr>:error: no column 'age'\n" + HOROVODRUNS_OWN)
    assert shown == b"rank 1: error: no column 'age'\nerror: rank 1 failed first: no column 'age'\n"


def test_a_killed_rank_is_named_with_its_signal():
    told = b"[1]<stderr>:Killed\n[0]<stderr>:tf_fusedrec: a rank ended without naming a cause. It was killed,\n"
    shown = forwarded(told + HOROVODRUNS_OWN.replace(b"code: 3", b"code: 137"))
    words = b"error: rank 1 failed first: it was ended by SIGKILL, as Linux does when memory runs out (exit code 137)\n"
    assert shown.endswith(words)


def test_a_killed_process_alone_is_named_with_its_signal(capfdbinary):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert launch_training.run([sys.executable, "-c", program]) == 139
    assert capfdbinary.readouterr().err == b"error: the process failed: it was ended by SIGSEGV (exit code 139)\n"


def test_a_failure_of_horovodrun_itself_is_shown_whole():
    own = b"Traceback (most recent call last):\n  File x\nValueError: no network interface\n"
    assert forwarded(own) == own


STAND_IN_FOR_HOROVODRUN = """
import os, subprocess, sys
rank = '''
import signal, sys, time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(130)
'''
done = subprocess.run([sys.executable, "-c", rank], env={**os.environ, "HOROVOD_RANK": "0"}, start_new_session=True)
sys.exit(done.returncode)
"""


def test_ctrl_c_reaches_the_ranks_and_waits_for_their_end(tmp_path):
    program = (
        "import signal, sys; from tools import launch_training\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.exit(launch_training.run([sys.executable, '-c', {STAND_IN_FOR_HOROVODRUN!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as job:
        assert job.stdout.readline() == "started\n"
        began = time.monotonic()
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=30)
    assert output == "saved\n"
    assert "the ranks have 60 s to end by themselves" in errors
    assert job.returncode == 130
    assert time.monotonic() - began < 20


def test_one_process_needs_no_horovodrun_and_several_do():
    alone = launch_training.training_command(1, "-rf", "a.yaml")
    assert alone == [sys.executable, "-m", "models.train", "--config=a.yaml", "--data=-rf"]
    launcher, *arguments = launch_training.training_command(2, "", "a.yaml")
    assert pathlib.Path(launcher).name == "horovodrun"
    assert arguments == ["-np", "2", "--gloo", "--disable-cache", *alone[:-1]]


def test_ctrl_c_reaches_a_process_alone(tmp_path):
    """A stand-in of models.train, which the launcher knows by its command."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/train.py").write_text(
        "import time\ntry:\n    print('started', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('saved', flush=True)\n    raise SystemExit(130)\n",
        encoding="utf-8",
    )
    program = (
        "import pathlib, signal, sys; from tools import launch_training\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell started the tests with &
        f"launch_training.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(launch_training.run(launch_training.training_command(1, '', 'a.yaml')))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=30)
    assert (output, job.returncode) == ("saved\n", 130), errors


@pytest.mark.parametrize(("processes", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_the_ranks_share_the_cores(processes, cores, threads):
    assert launch_training.threads_of(processes, cores) == threads


@pytest.mark.parametrize("own", [None, "7"])
def test_a_process_gets_its_threads_unless_the_user_chose_them(monkeypatch, capfdbinary, own):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.setattr(launch_training.os, "sched_getaffinity", lambda _: range(6))
    if own:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", own)
    program = "import os; print(os.environ['TF_NUM_INTRAOP_THREADS'])"
    assert launch_training.run([sys.executable, "-c", program], processes=2) == 0
    assert capfdbinary.readouterr().out == (own or "3").encode() + b"\n"


def test_no_process_is_refused():
    command = [sys.executable, "-m", "tools.launch_training", "--np", "0", "--data", "", "--config", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 2 and "error: NP must be a number of processes >= 1, got 0." in done.stderr
