"""The time from nothing to the first training step, of a clone whose `make train` is a few lines."""

from __future__ import annotations

import subprocess

import pytest

from tools import first_step

MAKEFILE = """
train:
	@echo "set-up of $(NP) processes"; test -e $(HOME)/kept && echo kept || touch $(HOME)/kept
	@printf 'Epoch 1/2\\r 1/63 [....'; {then}
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Makes a repository with this end of `make train`."""

    def make(then):
        folder = tmp_path / "repository"
        folder.mkdir()
        (folder / "Makefile").write_text(MAKEFILE.replace("{then}", then), encoding="utf-8")
        for command in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"],
        ):
            subprocess.run(["git", *command], cwd=folder, check=True)
        monkeypatch.setattr(first_step, "ROOT", folder)
        return tmp_path

    return make


def test_the_second_clone_finds_the_home_of_the_first_and_training_ends_at_the_first_step(repository, capfd):
    folder = repository("echo $$$$ > $(HOME)/pid; exec sleep 600")
    first, second = first_step.measure(folder, 3)
    assert first > 0 and second > 0
    printed = capfd.readouterr().out
    assert printed.count("set-up of 3 processes") == 2 and printed.count("kept") == 1
    for name in ("first", "second"):
        assert (folder / name / "Makefile").exists()


def test_an_end_before_the_first_step_is_an_error(repository, monkeypatch):
    folder = repository("true")
    monkeypatch.setattr(first_step, "FIRST_STEP", first_step.re.compile("never"))
    with pytest.raises(RuntimeError, match="ended before its first step"):
        first_step.measure(folder, 1)
