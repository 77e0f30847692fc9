"""The steps of the session with TensorFlow, here on the CPU in place of the device."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.ops.gpu import CASES
from tests.cuda import libraries
from tests.gpu import session, steps, tensorflow_session

# Words that the output of a step on the CPU must have.
PRINTED = {
    "placement": "('TableLookup', 'CPU')",
    "memory": "TensorFlow counts and limits the memory of a GPU alone",
    "bits": "equal bits: 32 programs",
    "streams": "200 lookups and updates behind TensorFlow's own kernels: equal",
    "ranks": "rows of the ranks: [",
    "model": "on /CPU:0 [",
}


# On the CPU a step compares the CPU with itself and protects the session's programs alone.
GATE = ("memory", "bits")


@pytest.mark.parametrize(
    "name",
    [name if name in GATE else pytest.param(name, marks=pytest.mark.nightly) for name in tensorflow_session.EXPECTED_S],
)
def test_the_step_runs_on_the_cpu(name, tmp_path):
    step = tensorflow_session.step(name, "/CPU:0")
    record = steps.run_step(step, tmp_path, "test", step.limit_s)
    assert record["state"] == (steps.LEFT_OUT if name == "memory" else steps.PASSED), record["output"]
    assert PRINTED[name] in record["output"]


@pytest.mark.skipif(tensorflow_session.lacking() is None, reason="there is a GPU")
def test_an_exit_code_of_2_and_the_missing_thing_without_a_gpu(tmp_path):
    for module in (session, tensorflow_session):
        done = subprocess.run(
            [sys.executable, "-m", module.__name__, "--folder", str(tmp_path)],
            cwd=steps.ROOT, capture_output=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert done.returncode == 2 and module.lacking() in done.stderr and "Remedy: see `--help`" in done.stderr
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(tensorflow_session.lacking() is not None, reason=f"no session: {tensorflow_session.lacking()}")
def test_the_session_passes_on_a_gpu(tmp_path):
    assert tensorflow_session.main(["--folder", str(tmp_path)]) == 0
    assert len([json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")]) == 6


def test_the_session_of_kernels_has_every_op_every_benchmark_and_the_sanitizer(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "sanitizer", lambda: "/bin/compute-sanitizer")
    kinds = {"checks": libraries.OPS, "quick": CASES, "benchmarks": CASES, "memcheck": libraries.OPS,
             "racecheck": libraries.OPS}  # fmt: skip
    wanted = [f"{kind}.{name}" for kind, names in kinds.items() for name in names]
    assert [step.name for step in session.steps_of(tmp_path)] == wanted
    assert all(importlib.util.find_spec(f"tests.cuda.checks.{op}") for op in libraries.OPS)


def test_a_session_goes_on_where_the_last_one_ended(tmp_path, capsys):
    """A step fails, one hangs, one does not apply, and one is too long for the budget."""

    def step(name, script, expected_s=0.0):
        return steps.Step(name, ("sh", "-c", script), expected_s, limit_s=0.5)

    library = tmp_path / "library"
    library.write_bytes(b"1")
    planned = [step("fails", f"echo >>{tmp_path}/ran; echo why; exit 3"), step("hangs", "exec sleep 60"),
               step("absent", "echo no device; exit 77"), step("long", "true", expected_s=60.0)]  # fmt: skip
    options = steps.options("", "").parse_args(["--minutes", "0.5", "--folder", str(tmp_path / "records")])
    assert [steps.session(planned, library, options) for _ in range(2)] == [1, 1]
    printed = capsys.readouterr().out
    assert "absent: left out in" in printed and "s no device\n" in printed and "exit code 3" in printed
    assert "left for the next session: long\nfailures: fails (failed), hangs (hung)\n" in printed
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "\n", "the second session repeated a step"
    library.write_bytes(b"2")
    assert steps.session(planned[3:], library, options) == 3
    options.only = ["nothing"]
    with pytest.raises(ValueError, match=r"--only nothing: no step has this in its name. Name one of \['fails'"):
        steps.session(planned, library, options)
