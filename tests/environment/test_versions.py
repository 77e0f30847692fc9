"""Versions of TensorFlow, Python and Keras: which can be, and what their environments are made of."""

import re
import subprocess
import sys

import pytest

from tools import debian_root, versions


@pytest.mark.parametrize(
    ("tensorflow", "python", "keras", "words"),
    [
        ("2.15.1", "3.11", "3", "TENSORFLOW must be a release from 2.16 to 2.22, got '2.15.1'"),
        ("2.21", "3.11", "3", "TENSORFLOW must be .*, got '2.21'. Name one in full"),
        ("2.19.1", "3.13", "3", "PYTHON must be a version from 3.10 to 3.12 for TensorFlow 2.19.1, got '3.13'"),
        ("2.22.0rc0", "3.9", "3", "PYTHON must be a version from 3.10 to 3.14 for TensorFlow 2.22.0rc0, got '3.9'"),
        ("2.21.0", "", "3", "got ''"),
        ("2.21.0", "3.12", "2.15", "KERAS must be 3, a release of Keras 3 such as 3.9, or legacy, got '2.15'"),
    ],
)
def test_versions_that_cannot_be_are_refused(tensorflow, python, keras, words, monkeypatch, capsys):
    given = [f"--tensorflow={tensorflow}", f"--python={python}", f"--keras={keras}"]
    monkeypatch.setattr(sys, "argv", ["versions", *given])
    assert versions.main() == 1
    assert re.match(f"error: .*{words}", capsys.readouterr().err)


def test_a_missing_compiler_is_named_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["versions", "--tensorflow=2.21.0", "--python=3.12"])
    assert versions.main() == 1
    assert capsys.readouterr().err.startswith("missing: a C++ compiler; g++ is not on PATH.\n  Remedy: ")
    assert not (tmp_path / "cache").exists()


def test_the_copy_follows_the_clone_and_keeps_its_virtual_environment(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    for name in ("a.py", "folder/b.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(name, encoding="utf-8")
    subprocess.run("git init -q && git add .", shell=True, cwd=clone, check=True)
    monkeypatch.setattr(debian_root, "ROOT", clone)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = versions.Environment("2.21.0", "3.12", "3")
    (copy.clone / ".venv").mkdir(parents=True)
    copy.copy_sources()
    (clone / "folder/b.py").rename(clone / "folder/c.py")
    copy.copy_sources()
    names = {str(path.relative_to(copy.clone)) for path in copy.clone.rglob("*")}
    assert names == {".venv", "a.py", "folder", "folder/c.py"}
