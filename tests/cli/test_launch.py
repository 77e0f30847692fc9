"""Ranks show the output of rank 0 alone, a failed rank is named last with its cause, and Ctrl-C lets ranks save."""

import functools
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.support.shared import ROOT
from tf_fusedrec.cli import launch
from tf_fusedrec.cli.main import main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def fusedrec(folder: pathlib.Path, program: str, *options: str, **streams) -> subprocess.Popen:
    """Starts `fusedrec run` for a program."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    words = ["run", *options, "--logs", "logs", "program.py"]
    return subprocess.Popen(
        [sys.executable, "-m", "tf_fusedrec.cli.main", *words], cwd=folder, env=ENVIRONMENT, start_new_session=True,
        encoding="utf-8", errors="replace", **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )  # fmt: skip


def output_of(folder: pathlib.Path, program: str, *options: str) -> tuple[int, str, str]:
    with fusedrec(folder, program, *options) as job:
        output, errors = job.communicate(timeout=120)
        return job.returncode, output, errors


RANK = "import os, sys, time; rank = int(os.environ.get('HOROVOD_RANK', 0)); "
RANKS = "int(os.environ.get('HOROVOD_SIZE', 1))"


def interruptible(at_ctrl_c: str, seconds: float = 300) -> str:
    """Returns a program that works for some seconds, and runs a line of code when it is interrupted.

    Rank 0 says "started" when all ranks have, so that an interruption finds each of them in the `try`.
    """
    return f"""{RANK}
try:
    open(f"started-{{rank}}", "w").close()
    while rank == 0 and len([name for name in os.listdir() if name.startswith("started-")]) < {RANKS}:
        time.sleep(0.01)
    print("started", flush=True)
    time.sleep({seconds})
except KeyboardInterrupt:
    {at_ctrl_c}
"""


def test_rank_0_shows_its_output_as_it_is_and_every_rank_has_a_log(tmp_path):
    program = RANK + "print(f'rank {rank}', sys.stdout.isatty()); "
    code, output, errors = output_of(tmp_path, program + "print('no', file=sys.stderr)", "-n", "2")
    assert (code, output, errors) == (0, "rank 0 False\n", "no\n")
    for rank in range(2):
        lines = (tmp_path / f"logs/rank-{rank}.log").read_text(encoding="utf-8").splitlines()
        assert sorted(lines) == ["no", f"rank {rank} False"]


def test_rank_0_has_a_terminal_where_the_launcher_has_one(tmp_path):
    """A bar that is drawn again and again reaches the terminal, and the log has its last form."""
    master, slave = pty.openpty()
    program = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size()); print('1/2\\r2/2')"
    with fusedrec(tmp_path, program, stdout=slave) as job:
        os.close(slave)
        shown = b""
        while shown.count(b"\n") < 2:
            shown += os.read(master, 1000)
        assert job.wait(timeout=120) == 0, job.stderr.read()
    os.close(master)
    assert shown.decode().startswith("True os.terminal_size(columns=") and b"1/2\r2/2" in shown
    assert (tmp_path / "logs/rank-0.log").read_text(encoding="utf-8").endswith(")\n2/2\n")


FAILURES = {
    "a traceback names the user's own line": (
        "def inner():\n    raise KeyError('my own bug')\ninner()",
        r'    File "\S+/program.py", line 4, in inner\n      raise KeyError\(.my own bug.\)\n'
        r"    KeyError: .my own bug.\n",
    ),
    "the user's line called a library": (
        "import json\njson.loads('x')",
        r'    File "\S+/program.py", line 4, in <module>\n      json.loads\(.x.\)\n'
        r"    json.decoder.JSONDecodeError: .*\n",
    ),
    "a killed rank": (
        "import signal; os.kill(os.getpid(), signal.SIGKILL)",
        r"    it was ended by SIGKILL, as Linux does when memory runs out \(exit code 137\)\n",
    ),
    "a code without words": ("sys.exit(7)", r"    it printed nothing, and ended with exit code 7\n"),
    "last words": ("print('no disk'); sys.exit(7)", r"    no disk\n"),
    "a rank that named its cause and was killed at its exit": (
        "import signal; print('tf_fusedrec: rank 1 failed first: no file', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        r"    no file\n",
    ),
    "an end that the watchdog names": (
        "print('tf_fusedrec: rank 1: failed: rank 0 has ended'); sys.exit(7)",
        r"    rank 0 has ended\n",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_rank_that_failed_first_and_its_cause_stand_last(tmp_path, monkeypatch, capfd, case):
    failing, shown = FAILURES[case]
    monkeypatch.setattr(launch, "TO_END_S", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(f"{RANK}\nif rank == 0: time.sleep(300)\n{failing}", encoding="utf-8")
    assert main(["run", "-n", "2", "--logs", "logs", "program.py"]) == 3
    errors = capfd.readouterr().err
    head = r"\nrank 1 failed first \(host \S+, pid \d+, after \d+ s\):\n"
    tail = r"rank 0 was healthy and stopped. Full output of every rank: logs/rank-\*.log\n"
    assert re.fullmatch(head + shown + tail, errors), errors


@pytest.mark.parametrize(
    ("options", "signals", "saved"), [([], 1, True), (["-n", "2"], 1, True), (["-n", "2"], 2, False)]
)
def test_ctrl_c_lets_the_ranks_save_and_a_second_one_ends_them(tmp_path, options, signals, saved):
    seconds = 300 if signals > 1 else 0.2
    program = interruptible(f"time.sleep({seconds}); print('saved', flush=True); sys.exit(130)")
    with fusedrec(tmp_path, program, *options) as job:
        assert job.stdout.readline() == "started\n"
        for number in range(signals):
            if number:
                assert job.stderr.readline() == "\n" and "once more to end at once" in job.stderr.readline()
            job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=50)
    assert (output, job.returncode) == ("saved\n" if saved else "", 130), errors
    assert ("stopping after this step; once more to end at once ..." in errors) == (signals == 1)
    assert "failed" not in errors and "Traceback" not in errors


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_a_save_that_fails_after_ctrl_c_is_a_failure(tmp_path, options):
    program = interruptible("raise OSError(28, 'No space left on device') from None")
    with fusedrec(tmp_path, program, *options) as job:
        assert job.stdout.readline() == "started\n"
        job.send_signal(signal.SIGINT)
        errors = job.communicate(timeout=50)[1]
    assert job.returncode == 3 and "OSError: [Errno 28] No space left on device\n" in errors, errors


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_is_a_ctrl_c_unless_nohup_ignores_it(tmp_path, ignored):
    """The ranks save although a shell and the kernel both send SIGHUP, and nothing can be shown any more."""
    program = interruptible("time.sleep(0.5); open('saved', 'w').close(); sys.exit(130)", 1 if ignored else 300)
    master, slave = pty.openpty()
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL  # These tests may run under nohup themselves.
    prepare = functools.partial(signal.signal, signal.SIGHUP, handler)
    with fusedrec(tmp_path, program, "-n", "2", preexec_fn=prepare, **streams) as job:
        os.close(slave)
        assert os.read(master, 100).startswith(b"started")
        os.close(master)
        for _ in range(2):
            job.send_signal(signal.SIGHUP)
        job.wait(timeout=50)
    assert (tmp_path / "saved").exists() != ignored
    assert ignored or job.returncode == 130


def test_json_has_the_failure_and_the_output_of_rank_0_goes_to_the_errors(tmp_path):
    code, output, errors = output_of(tmp_path, "print('shown'); raise ValueError('planned')", "--json")
    assert code == 3 and errors.startswith("shown\n")
    document = json.loads(output)
    assert document["code"] == 3 and document["failure"]["rank"] == 0
    assert document["failure"]["cause"] == "ValueError: planned"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-n", "0", "a.py"], "-n must be at least 1, got 0."),
        (["nowhere.py"], "PROGRAM: no such file 'nowhere.py'."),
        (["--logs", "a.py/b", "a.py"], "the logs cannot be written: [Errno 20] Not a directory: 'a.py/b'. Use another"),
        (["nothing"], "PROGRAM: no such program 'nothing'. Name a file that ends in .py, or a program on PATH."),
        (["--hostfile", "hosts", "a.py"], "--hostfile: no such file 'hosts'."),
        (["-H", "192.0.2.1:2", "a.py"], "hosts 192.0.2.1 need --network-interface, the card of the network, such as"),
        (["-n", "3", "-H", "localhost:2", "a.py"], "Requested more processes (3) than there are available slots (2)"),
    ],
)
def test_a_job_that_cannot_start_is_refused(tmp_path, monkeypatch, capsys, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    assert main(["run", *words]) == 1
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_another_host_gets_the_folder_the_variables_and_the_signals(tmp_path, monkeypatch):
    """A stand-in for ssh starts a shell on this host, without this environment."""
    from tests.support.ranks import environment_of_ranks

    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != far ]; do shift; done; shift\nexec env -i PATH="$PATH" sh -c "$*"\n')
    ssh.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit('told'))\n"
        "print(os.getcwd(), os.environ['OWN'], flush=True)\ntime.sleep(300)\n",
        encoding="utf-8",
    )
    env = {**environment_of_ranks(os.environ), "OWN": "a b'c", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.chdir(tmp_path)
    rank = launch.Rank(1, "far", [sys.executable, str(program)], env, tmp_path / "log", None)
    while f"{tmp_path} a b'c" not in (tmp_path / "log").read_text(encoding="utf-8"):
        assert rank.process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
    rank.send(signal.SIGINT)
    assert rank.wait() == 1 and (tmp_path / "log").read_text(encoding="utf-8").endswith("told\n")
