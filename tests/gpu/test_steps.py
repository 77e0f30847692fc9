"""Sessions on a GPU plan, run and record their steps, here with commands that need no GPU."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.gpu import steps
from tests.gpu.steps import Step

LIBRARY = "0123456789abcdef"
SLEEP = "import subprocess, sys, time; print('began', flush=True); time.sleep(60)"
WITH_A_CHILD = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(60)"
)


def step(name, code="print('done')", *arguments, expected_s=0.0, limit_s=30.0):
    return Step(name, (sys.executable, "-c", code, *arguments), expected_s, limit_s)


def session_of(found, tmp_path, *words):
    """Runs a session of these steps. Returns its exit code."""
    library = tmp_path / "library.so"
    if not library.exists():
        library.write_bytes(b"a library")
    arguments = steps.options("", "x").parse_args(["--folder", str(tmp_path / "out"), *words])
    return steps.session(found, library, arguments)


def test_the_cheapest_step_comes_first_and_equal_ones_keep_their_order(tmp_path):
    found = [step("c", expected_s=3.0), step("a", expected_s=1.0), step("d", expected_s=3.0), step("b", expected_s=1.0)]
    planned = steps.plan(found, tmp_path, LIBRARY, [], again=False)
    assert [one.name for one in planned.to_run] == ["a", "b", "c", "d"] and not planned.recorded


def test_only_names_steps_and_an_unknown_name_is_refused(tmp_path):
    found = [step("checks.table"), step("checks.recovery"), step("memcheck.table")]
    planned = steps.plan(found, tmp_path, LIBRARY, ["table", "memcheck"], again=False)
    assert [one.name for one in planned.to_run] == ["checks.table", "memcheck.table"]
    with pytest.raises(ValueError, match="--only tabel: no step has this in its name. Name one of .*'checks.table'"):
        steps.plan(found, tmp_path, LIBRARY, ["recovery", "tabel"], again=False)


def test_a_step_with_a_record_is_skipped_unless_asked_again_or_of_another_library(tmp_path):
    found = [step("one"), step("two")]
    steps.run_step(found[0], tmp_path, LIBRARY, 30.0)
    for library, again, wanted in ((LIBRARY, False, ["two"]), (LIBRARY, True, ["one", "two"]), ("f" * 16, False, 2)):
        planned = steps.plan(found, tmp_path, library, [], again=again)
        names = [one.name for one in planned.to_run]
        assert names == (["one", "two"] if wanted == 2 else wanted)
        assert len(planned.recorded) == 2 - len(names)
    (tmp_path / "one.json").write_text("{ torn", encoding="utf-8")
    assert len(steps.plan(found, tmp_path, LIBRARY, [], again=False).to_run) == 2


def test_a_record_has_state_time_command_and_the_end_of_the_output(tmp_path):
    code = f"print('x' * {2 * steps.TAIL_BYTES}); print('last'); raise SystemExit(int(__import__('sys').argv[1]))"
    for exit_code, state in ((0, "passed"), (3, "failed"), (steps.LEFT_OUT_CODE, "left out")):
        record = steps.run_step(step("one", code, str(exit_code)), tmp_path, LIBRARY, 30.0)
        assert record == json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
        assert (record["state"], record["exit_code"], record["library"]) == (state, exit_code, LIBRARY)
        assert record["output"].endswith("last\n") and len(record["output"]) == steps.TAIL_BYTES
        assert 0 < record["seconds"] < 30 and record["command"][0] == sys.executable
        assert (tmp_path / "one.log").stat().st_size > steps.TAIL_BYTES


def test_a_step_that_hangs_is_ended_with_its_children_and_named(tmp_path, capsys):
    pid = tmp_path / "pid"
    hangs = step("hangs", WITH_A_CHILD, str(pid), expected_s=0.1, limit_s=1.5)
    begin = time.monotonic()
    assert session_of([step("passes"), hangs, step("later", expected_s=0.2)], tmp_path) == 1
    assert time.monotonic() - begin < 20
    printed = capsys.readouterr().out
    assert "later: passed" in printed and "\nfailures: hangs (hung)\n" in printed
    record = steps.read_record(tmp_path / "out", "hangs", steps.identity(tmp_path / "library.so"))
    assert record["state"] == "hung" and record["exit_code"] is None
    child = state_of_process(int(pid.read_text(encoding="utf-8")))
    assert child is None or child == "Z"


def state_of_process(pid):
    """The state letter of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return None


def test_a_step_begins_only_with_its_expected_time_left(tmp_path):
    planned = steps.Plan([step("fits", expected_s=20.0), step("waits", expected_s=20.5)], [])
    times = iter([100.0, 110.0, 110.0])  # of a budget of 30 s, 20 s are left for each step
    records = dict(steps.run(planned, tmp_path, LIBRARY, 30.0, lambda: next(times)))
    assert {one.name: record is not None for one, record in records.items()} == {"fits": True, "waits": False}
    assert not (tmp_path / "waits.log").exists()


def test_the_budget_leaves_steps_for_the_next_session_which_goes_on_with_them(tmp_path, capsys):
    slow = step("slow", SLEEP, expected_s=0.5)
    found = [step("quick"), slow, step("long", expected_s=3600.0)]
    assert session_of(found, tmp_path, "--minutes", "0.03") == 3  # the budget cuts slow off
    printed = capsys.readouterr().out
    assert "quick: passed" in printed and "left for the next session: slow, long" in printed
    assert not (tmp_path / "out/slow.json").exists() and "failures" not in printed
    assert "began" in (tmp_path / "out/slow.log").read_text(encoding="utf-8")
    found = [found[0], step("slow", expected_s=0.5), step("long", expected_s=1.0)]
    assert session_of(found, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "quick: has a record, passed" in printed and "slow: passed" in printed and "all passed" in printed


def test_failures_of_an_earlier_session_stand_at_the_end_again(tmp_path, capsys):
    fails = step("fails", "raise SystemExit('the reason')")
    assert session_of([fails, step("passes", expected_s=1.0)], tmp_path) == 1
    capsys.readouterr()
    assert session_of([fails, step("passes", expected_s=1.0)], tmp_path) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("failures: fails (failed)\n") and "the reason" in printed
    assert session_of([step("fails"), step("passes")], tmp_path, "--only", "fails", "--again") == 0


def test_what_is_left_out_says_why_and_is_no_failure(tmp_path, capsys):
    code = f"print('no second device'); raise SystemExit({steps.LEFT_OUT_CODE})"
    assert session_of([step("one", code)], tmp_path) == 0
    assert "left out: one: no second device" in capsys.readouterr().out
