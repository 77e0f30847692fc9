"""Versions of TensorFlow, Python and Keras: which can be, and what their environments are made of."""

import re
import sys

import pytest

from tools import versions


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
