"""Pairs of TensorFlow and Python: which can be, and what their environments are made of."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tools.steps import StepFailed
from tools.versions import environment
from tools.versions.pairs import NEWEST_PYTHON, pair

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_pair_asks_for_the_keras_of_the_same_number():
    assert pair("2.20.0", "3.13").requirements() == ["tensorflow==2.20.0", "tf-keras==2.20.*"]


@pytest.mark.parametrize(
    ("tensorflow", "python", "words"),
    [
        ("2.15.1", "3.11", "TENSORFLOW must be a release from 2.16 to 2.21, got '2.15.1'"),
        ("2.21", "3.11", "TENSORFLOW must be .*, got '2.21'. Name one in full"),
        ("2.19.1", "3.13", "PYTHON must be a version from 3.10 to 3.12 for TensorFlow 2.19.1, got '3.13'"),
        ("2.21.0", "3.9", "PYTHON must be a version from 3.10 to 3.13 for TensorFlow 2.21.0, got '3.9'"),
        ("2.21.0", "", "got ''"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(tensorflow, python, words):
    with pytest.raises(ValueError, match=words):
        pair(tensorflow, python)


def test_make_passes_the_pair_and_a_pair_that_cannot_be_is_named():
    done = subprocess.run(
        ["make", "test-on", "TENSORFLOW=2.18.1", "PYTHON=3.13"],
        cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    assert done.returncode != 0
    assert "error: PYTHON must be a version from 3.10 to 3.12 for TensorFlow 2.18.1, got '3.13'" in done.stderr


def test_a_missing_compiler_is_named_before_anything_is_made(tmp_path):
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "tools.versions", "--tensorflow", "2.21.0", "--python", "3.12"],
        cwd=ROOT, env={**os.environ, "PATH": "", "XDG_CACHE_HOME": str(cache)}, capture_output=True, encoding="utf-8",
        errors="replace",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("missing: a C++ compiler; g++ is not on PATH.\n  Remedy: "), done.stderr
    assert not cache.exists()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns an environment of an empty cache, of a clone with two files."""
    clone = tmp_path / "clone"
    for name in ("a.py", "folder/b.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(name, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=clone, check=True)
    monkeypatch.setattr(environment, "ROOT", clone)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return environment.Environment(pair("2.21.0", "3.12"))


def test_the_copy_follows_the_clone_and_keeps_the_time_of_equal_files(made):
    made.clone.mkdir(parents=True)
    made.copy_sources()
    kept = made.clone / "a.py"
    os.utime(kept, (1, 1))
    (made.clone / "built.so").touch()
    (environment.ROOT / "a.py").touch()
    (environment.ROOT / "folder/b.py").rename(environment.ROOT / "folder/c.py")
    made.copy_sources()
    found = {str(path.relative_to(made.clone)) for path in made.clone.rglob("*.*")}
    assert found == {"a.py", "folder/c.py", "built.so"}
    assert kept.stat().st_mtime == 1


def test_the_wheel_of_the_pair_comes_into_the_clone(made, monkeypatch):
    def build(what, *arguments):
        assert arguments == ("-m", "tools.wheel")
        for name, seconds in (("tf_fusedrec-9+tf2.21.0.whl", 1), ("tf_fusedrec-10+tf2.21.0.whl", 2)):
            (made.clone / "dist" / name).write_text(name, encoding="utf-8")
            os.utime(made.clone / "dist" / name, (seconds, seconds))

    (made.clone / "dist").mkdir(parents=True)
    monkeypatch.setattr(made, "run", build)
    wheel = made.wheel()
    assert wheel == environment.ROOT / "dist/tf_fusedrec-10+tf2.21.0.whl"  # the one that was built last
    assert wheel.read_text(encoding="utf-8") == wheel.name and len(list(wheel.parent.iterdir())) == 1


def test_a_python_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    with pytest.raises(StepFailed, match=r"missing: python3\.12; none on PATH runs\.\n  Remedy: install it"):
        environment.find_python("3.12")


def test_the_page_lists_pairs_that_can_be_with_their_dates():
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (2\.\d+\.\d+) \| (\S+) \| (3\.\d+) \| \S+ \| 20\d\d-\d\d-\d\d \|$", page, re.MULTILINE)
    assert rows
    for tensorflow, keras, python in rows:
        assert keras.startswith(pair(tensorflow, python).minor)
    assert f"TensorFlow 2.{min(NEWEST_PYTHON)} to 2.{max(NEWEST_PYTHON)}" in page
    first = min(minor for minor, newest in NEWEST_PYTHON.items() if newest == 13)
    assert f"for Python 3.13 from 2.{first} on" in " ".join(page.split())
