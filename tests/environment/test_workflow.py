"""The workflow for a hosting site calls commands of the Makefile, with pairs that tools.versions takes."""

import pathlib
import re

import yaml

from tools.versions.pairs import NEWEST_PYTHON, OLDEST_PYTHON, pair

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]


def test_every_command_is_a_target_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert [command.split()[0] for command in commands] == ["make"] * len(JOBS)
    assert {command.split()[1] for command in commands} == {"test", "test-on", "wheel", "docs"} <= targets


def test_every_minor_of_tensorflow_and_python_is_in_a_pair():
    pairs = [pair(one["tensorflow"], one["python"]) for one in JOBS["pair"]["strategy"]["matrix"]["include"]]
    assert {one.minor for one in pairs} == {f"2.{minor}" for minor in NEWEST_PYTHON}
    pythons = range(OLDEST_PYTHON, max(NEWEST_PYTHON.values()) + 1)
    assert {one.python for one in pairs} == {f"3.{minor}" for minor in pythons}
