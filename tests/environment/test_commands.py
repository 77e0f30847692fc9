"""The Makefile's targets, the README's commands and the pinned versions are right; no file names a machine's path."""

import importlib.metadata
import importlib.util
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from tools.versions.pairs import NEWEST_PYTHON, OLDEST_PYTHON

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_the_targets_are_there_and_help_is_the_default():
    assert {"help", "setup", "train", "test", "lint", "bench", "docs", "wheel", "clean"} <= TARGETS
    shown = subprocess.run(
        ["make"], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout
    for target in TARGETS:
        assert re.search(rf"^  {target}\s+\w", shown, re.MULTILINE), target


@pytest.mark.parametrize("arguments", [["train", "NP=3"], ["test"], ["bench"], ["docs"], ["wheel"], ["lint"]])
def test_every_target_sets_up_first_and_runs_from_the_virtual_environment(arguments):
    plan = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=True
    ).stdout
    set_up, rest = plan.split('tools.setup_env --train="$NP"\n' if arguments[0] == "train" else "tools.setup_env\n", 1)
    assert "tools/find_python.sh" in set_up
    assert ".venv/bin/" in rest


@pytest.mark.parametrize(
    "value", ['x"; touch broken; "', "$(touch broken)", "$$(touch broken)", "$(shell touch broken)"]
)
@pytest.mark.parametrize("target", ["train", "bench"])
def test_a_value_given_to_make_is_never_run_as_a_command(tmp_path, target, value):
    (tmp_path / "Makefile").write_text(MAKEFILE, encoding="utf-8")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n', encoding="utf-8")
    python.chmod(0o755)
    taken = ("NP", "DATA", "CONFIG") if target == "train" else ("BENCHMARKS",)
    no_set_up = ["--old-file=setup", "--old-file=runtime"]
    done = subprocess.run(
        ["make", *no_set_up, target, f"PYTHON={value}", f"BIN={value}", *(f"{name}={value}" for name in taken)],
        cwd=tmp_path, capture_output=True, encoding="utf-8", errors="replace", check=True,
    )  # fmt: skip
    assert not (tmp_path / "broken").exists()
    if target == "train":
        assert [line.partition("=")[2] for line in done.stdout.splitlines()[2:]] == [f"{value}>"] * 3
    else:
        assert f"<benchmarks.{value.split()[0]}>" in done.stdout


def test_the_readmes_make_commands_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"train", "test"} <= named <= TARGETS


def test_the_readmes_modules_exist():
    for module in re.findall(r"python -m ([\w.]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_benchmark_of_the_list_exists():
    (names,) = re.findall(r"^BENCHMARKS := (.*)$", MAKEFILE, re.MULTILINE)
    for name in names.split():
        assert importlib.util.find_spec(f"benchmarks.{name}"), name


def test_continuous_integration_runs_the_tests():
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text(encoding="utf-8") and "make test" in script.read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_requirement_is_pinned_exactly(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(
            r'[a-z0-9-]+==[0-9][\w.]*( ; (python_version [<>=]+ "3\.\d+"|platform_machine == "x86_64"))?', line
        ), line


@pytest.fixture
def setup_py(monkeypatch):
    """Returns the names of setup.py, run without setuptools."""
    monkeypatch.setattr("setuptools.setup", lambda **metadata: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def test_the_metadata_ask_for_the_pinned_versions(setup_py):
    files = (ROOT / f"requirements/{name}.txt" for name in ("runtime", "tfra"))
    pinned = "".join(path.read_text(encoding="utf-8") for path in files)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", pinned, re.MULTILINE))
    text = PYPROJECT + (ROOT / "tf_fusedrec/tables/tfra_library.py").read_text(encoding="utf-8")
    asked = re.findall(r'"tensorflow-recommenders-addons==([\w.]+)[" ]', text)
    assert asked == [pins["tensorflow-recommenders-addons"]] * 2
    assert f'"tensorflow{setup_py["ALLOWED_TENSORFLOW"]}"' in PYPROJECT  # of the build
    assert pins["tensorflow"] in SpecifierSet(setup_py["ALLOWED_TENSORFLOW"])
    (extra,) = re.findall(r"^serve = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    listed = (ROOT / "requirements/serve.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w-]+)==([\w.]+)", listed, re.MULTILINE)
    assert {name for name, _ in pinned} == {"prometheus-client", "tornado"}
    for name, version in pinned:
        assert version in SpecifierSet(re.search(f'"{name}([^"]+)"', extra)[1]), name
    assert pins["tf-keras"] in SpecifierSet(setup_py["ALLOWED_KERAS"])


def test_the_metadata_allow_the_pairs_that_are_tested(setup_py):
    (python,) = re.findall(r'^requires-python = "(.*)"$', PYPROJECT, re.MULTILINE)
    for number in range(9, 15):
        tested = OLDEST_PYTHON <= number <= max(NEWEST_PYTHON.values())
        assert (f"3.{number}.1" in SpecifierSet(python)) == tested, number
        assert (f"Python :: 3.{number}" in PYPROJECT) == tested, number
    for number in range(15, 23):
        for allowed in ("ALLOWED_TENSORFLOW", "ALLOWED_KERAS"):
            assert (f"2.{number}.2" in SpecifierSet(setup_py[allowed])) == (number in NEWEST_PYTHON), number


def test_a_wheel_requires_the_tensorflow_of_its_build_and_a_source_distribution_any(setup_py, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.19.1")
    version, required = setup_py["version_and_requirements"]()
    assert version.endswith("+tf2.19.1") and {"tensorflow==2.19.1", "tf-keras==2.19.*"} <= set(required)
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    plain, required = setup_py["version_and_requirements"]()
    assert f"{plain}+tf2.19.1" == version
    assert {f"tensorflow{setup_py['ALLOWED_TENSORFLOW']}", f"tf-keras{setup_py['ALLOWED_KERAS']}"} <= set(required)


def test_no_file_names_a_place_on_one_machine():
    """No tracked file names a home, temporary or working folder of a developer's machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    machine_path = re.compile(r"(?<![\w./$}])/(?:root|home|work|tmp|opt)/\w")
    bad = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".txt", ".toml", ".yaml", ".md", ".sh", ".cc", ".h", "") and path.is_file():
            for number, line in enumerate(path.read_text(errors="replace", encoding="utf-8").splitlines(), 1):
                if machine_path.search(line):
                    bad.append(f"{name}:{number}: {line.strip()}")
    assert not bad, "\n".join(bad)
