"""The steps of the session with TensorFlow, here on the CPU in place of the device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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


def test_the_session_of_kernels_begins_with_checks_and_ends_with_the_sanitizer(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "sanitizer", lambda: "/bin/compute-sanitizer")
    planned = steps.plan(session.steps_of(tmp_path), tmp_path, "test", [], again=False).to_run
    kinds = [step.name.split(".")[0] for step in planned]
    order = ["checks", "quick", "benchmarks", "memcheck", "racecheck"]
    assert kinds == sorted(kinds, key=order.index) and set(kinds) == set(order)
    assert sum(step.expected_s for step in planned if not step.name.startswith("racecheck")) < 1200
    assert all(step.expected_s < step.limit_s <= 240 for step in planned)
    quick = next(step for step in planned if step.name == "quick.table")
    assert quick.command[-2:] == (str(tmp_path / "quick.table.results.json"), "--quick")
    assert planned[-1].command[:3] == ("/bin/compute-sanitizer", "--tool", "racecheck")
