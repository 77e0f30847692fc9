"""`fusedrec doctor` reports what is installed, trains, and names what does not work with a remedy."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.shared import ROOT
from tf_fusedrec.cli.main import main
from tf_fusedrec.doctor import report, trial

REPORT = (
    r"versions",
    r"  tensorflow +2\.\d+\.\d+",
    r"  horovod +0\.\d+\.\d+",
    r"  Keras in use +(keras 3|tf_keras 2)\.\d+\.\d+",
    r"  built for +TensorFlow 2\.\d+\.\d+",
    r"  CPU kernels +(AVX|SSE|Neon).*, on \d+ of \d+ cores",
    r"GPU",
    r"  one process +10 steps, [\d.]+ ms each, loss 0\.\d+ to 0\.\d+",
    r"  two processes +10 steps, [\d.]+ ms each, loss 0\.\d+ to 0\.\d+; rows are those of one process",
    r"  Horovod +built with gloo",
    r"  exchange +(gloo|horovod; this installation was built without gloo)$",
    r"result: all that is installed works",
)
ONE = {"losses": [1.0, 0.5], "rows": {"3": [0.5], "4": [0.25]}, "seconds": 0.001, "horovod": []}


def doctor(**variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "tf_fusedrec.cli.main", "doctor"], cwd=ROOT, env=env, capture_output=True,
        encoding="utf-8", errors="replace", timeout=700,
    )  # fmt: skip


@pytest.mark.nightly
def test_the_whole_report_of_a_sound_installation():
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    for line in REPORT:
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), f"{line}\n{done.stdout}"


def test_without_horovod_one_process_trains_and_is_enough(monkeypatch, capsys):
    is_installed = report.is_installed
    monkeypatch.setattr(report, "is_installed", lambda name: name != "horovod" and is_installed(name))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    lines = [*REPORT[:2], *REPORT[3:8], "  two processes  not tried, because Horovod is not installed", REPORT[-1]]
    for line in lines:
        assert re.search(f"^{line}", printed, re.MULTILINE), f"{line}\n{printed}"


@pytest.mark.nightly
def test_a_horovod_without_tensorflow_is_named_with_the_remedy(tmp_path):
    """The package is there, and importing horovod.tensorflow fails, as where Horovod was built without TensorFlow."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['horovod.tensorflow'] = None\n", encoding="utf-8"
    )
    done = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1, done.stdout + done.stderr
    _, failure = done.stdout.split("  two processes FAILED: ")
    assert "Gloo support has not been built" in failure
    assert "Remedy: build Horovod with TensorFlow and Gloo, as docs/install.md says." in failure
    assert done.stdout.endswith("result: two processes failed\n")


def test_each_failure_is_in_the_result(monkeypatch, capsys):
    def fail(processes):
        raise trial.TrialFailed(f"{processes} planned")

    monkeypatch.setattr(trial, "run", fail)
    monkeypatch.setattr(report, "why_tfra_does_not_load", lambda: "ImportError: planned")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    for line in (
        "TFRA FAILED: ImportError: planned",
        "one process FAILED: 1 planned",
        "two processes FAILED: 2 planned",
    ):
        assert f"  {line}\n" in printed
    assert printed.endswith("result: TFRA, one process, two processes failed\n")
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == {
        "TFRA": "ImportError: planned",
        "one process": "1 planned",
        "two processes": "2 planned",
    }
    assert document["versions"]["tensorflow"].startswith("2.")


@pytest.mark.parametrize(
    ("several", "words"),
    [
        ({**ONE, "rows": {"3": [0.5]}}, "one process has 2 rows, several have 1"),
        ({**ONE, "rows": {"3": [0.5], "4": [0.2502]}}, "differ from the rows of one process by up to 0.0002"),
    ],
)
def test_other_rows_than_those_of_one_process_are_a_failure(several, words):
    trial.check_equal(ONE, {**ONE, "rows": {"3": [0.5], "4": [0.25001]}})
    with pytest.raises(trial.TrialFailed, match=f"{words}.*\n    Remedy: "):
        trial.check_equal(ONE, several)


def test_a_program_that_hangs_is_ended_with_its_children_and_named(tmp_path):
    pid = tmp_path / "pid"
    started = ["sh", "-c", f"sh -c 'echo $$ > {pid}; exec sleep 600' & wait"]
    with pytest.raises(trial.TrialFailed, match=r"no answer to 10 steps within 5 s.\n    Remedy: "):
        trial.run_program(started, 5.0)
    # The kernel ends a killed process in its own time; a zombie has ended, and waits for its new parent.
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(pid.read_text(encoding="utf-8")))
        deadline = time.monotonic() + 60.0
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, child
            time.sleep(0.01)


def test_the_end_of_a_program_by_a_signal_has_its_remedy():
    program = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGILL:d})"]
    told = trial.explain(trial.run_program(program, 60.0))
    assert "| Illegal instruction" in told and "Remedy: build the custom ops on this machine" in told


def test_a_remedy_that_the_program_names_is_passed_on_and_an_unknown_failure_shows_its_end():
    output = "notice\nImportError: no ops. Remedy: build them.\n\n[1]<stderr>: more\n"
    assert trial.explain(output) == "ImportError: no ops. Remedy: build them."
    unknown = trial.explain("\n".join(f"line {number}" for number in range(100)))
    assert "| line 99\n" in unknown and "line 80" not in unknown and "Remedy: none is known; report this" in unknown
