"""The set-up names what is missing, and repeats changed and interrupted steps only."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.shared import ROOT
from tools import prerequisites, setup_env


def program(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes an executable shell script in the place of a real program."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Makes a clone of a few files with a .venv that looks complete."""
    for name in ("runtime", "tfra", "serve", "build", "dev", "docs"):
        name = f"requirements/{name}.txt"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("tensorflow==2\n", encoding="utf-8")
    (tmp_path / "requirements/horovod.txt").write_text("horovod==1\n", encoding="utf-8")
    for name in ("setup.py", "pyproject.toml", "tf_fusedrec/__init__.py", "custom_ops/a/a.cc", "custom_ops/a/a.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(setup_env, "STAMPS", tmp_path / ".venv/.setup")
    monkeypatch.setattr(setup_env, "INSTALLING", tmp_path / ".venv/.setup/installing")
    monkeypatch.setattr(setup_env, "LIBRARY", tmp_path / "ops.so")
    monkeypatch.delenv("PYTHON", raising=False)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/.setup").mkdir()
    (tmp_path / ".venv/bin/python").write_text("", encoding="utf-8")
    (tmp_path / ".venv/bin/pip").write_text(f"#!{tmp_path}/.venv/bin/python3.11\nimport re\n", encoding="utf-8")
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = somewhere\nversion = 3.11.7\n", encoding="utf-8")
    (tmp_path / "ops.so").write_text("", encoding="utf-8")
    for step in setup_env.EVERYTHING:
        stamp(step)
    assert setup_env.is_complete()
    return tmp_path


def stamp(step: str) -> None:
    (setup_env.STAMPS / step).write_text(setup_env.inputs_of(step, "3.11.7"), encoding="utf-8")


def write(name: str, text: str = "tensorflow==3\nhorovod==2\n"):
    return lambda clone, patch: (clone / name).write_text(text, encoding="utf-8")


def want(name: str):
    return lambda clone, patch: patch.setenv(name, "true")


@pytest.mark.parametrize(
    "change",
    [
        *map(write, ("requirements/runtime.txt", "requirements/dev.txt", "requirements/horovod.txt", "setup.py",
                     "custom_ops/a/a.h")),
        lambda clone, patch: (clone / "custom_ops/a/a.cc").rename(clone / "custom_ops/a/b.cc"),
        lambda clone, patch: (clone / "ops.so").unlink(),
        *map(want, ("FUSEDREC_CUDA", "FUSEDREC_CUDA_ARCHS", "CXX", "NVCC", "PYTHON")),
        # An installation that was broken off, and a virtual environment that was copied here.
        lambda clone, patch: setup_env.INSTALLING.touch(),
        write(".venv/bin/pip", "#!/elsewhere/.venv/bin/python3.11\nimport re\n"),
    ],
)  # fmt: skip
def test_changes_of_files_by_their_content_and_other_wishes_are_noticed(clone, monkeypatch, change):
    monkeypatch.setattr(setup_env, "running_version", lambda: "3.10.13")  # of interest to PYTHON alone
    (clone / "setup.py").touch()
    assert setup_env.is_complete()
    change(clone, monkeypatch)
    assert not setup_env.is_complete()


def test_a_gpu_driver_installed_later_is_noticed(clone, monkeypatch):
    driver = clone / "programs/nvidia-smi"
    driver.parent.mkdir()
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    stamp("package")
    assert setup_env.is_complete()
    program(driver, "")
    assert not setup_env.is_complete()


@pytest.mark.parametrize("given", ["zwei", "0", "-1", ""])
def test_a_number_of_processes_that_is_none_is_refused_before_anything_changes(monkeypatch, capsys, given):
    monkeypatch.setattr(setup_env.sys, "argv", ["setup_env", f"--train={given}"])
    monkeypatch.setattr(setup_env.object_cache, "locked", lambda *_: pytest.fail("the set-up began"))
    assert setup_env.main() == 2
    assert capsys.readouterr().err == f"error: NP must be a number of processes >= 1, got {given!r}.\n"


def test_missing_programs_stop_the_set_up_before_anything_is_made(tmp_path):
    """Runs the whole set-up in an empty clone with an empty PATH."""
    shutil.copytree(ROOT / "tools", tmp_path / "clone/tools")
    done = subprocess.run(
        [sys.executable, "-m", "tools.setup_env"], cwd=tmp_path / "clone", env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    assert done.returncode == 1
    assert "missing: a C++ compiler; g++ is not on PATH.\n  Remedy: Debian, Ubuntu: apt install g++" in done.stderr
    for name in ("make", "patch"):
        assert f"missing: {name} is not on PATH.\n  Remedy: Debian, Ubuntu: apt install {name}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "clone/.venv").exists()


def test_the_machine_here_lacks_nothing_and_one_process_needs_no_patch(tmp_path, monkeypatch):
    assert prerequisites.missing(ROOT, tmp_path, fresh=False) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(program(tmp_path / "g++", "exit 0")))
    program(tmp_path / "make", "exit 0")
    assert prerequisites.missing(ROOT, tmp_path, fresh=False, horovod=False) == []
    (message,) = prerequisites.missing(ROOT, tmp_path, fresh=False)
    assert message.startswith("missing: patch is not on PATH.")


def test_another_machine_a_path_with_a_blank_an_old_compiler_and_a_full_disk_are_named(tmp_path, monkeypatch):
    old = program(tmp_path / "g++", "echo \"g++: error: unrecognized command-line option '-std=c++17'\"; exit 1")
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(prerequisites.platform, "machine", lambda: "ppc64le")
    monkeypatch.setattr(prerequisites.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    # Each has room for itself, but they share the disk.
    free = shutil.disk_usage(tmp_path).free
    for room in ("ROOM_FOR_CLONE", "ROOM_FOR_CACHE", "ROOM_FOR_TEMPORARY"):
        monkeypatch.setattr(prerequisites, room, 0.6 * free)
    monkeypatch.setattr(prerequisites.tempfile, "gettempdir", lambda: str(tmp_path))
    told = prerequisites.missing(tmp_path / "my clones/one", tmp_path / "not/yet/there", fresh=True)
    for words, message in zip(
        ("x86-64 or aarch64; this is Linux on ppc64le", "a path without blanks; this clone lies in '.*my clones/one'",
         "the module ensurepip", r"C\+\+17; .*unrecognized command-line option", "disk space; .* GiB free"), told,
        strict=True,
    ):  # fmt: skip
        assert re.match(f"missing: .*{words}.*\n  Remedy: ", message), message


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        # pyenv puts shims of missing versions on PATH, which fail.
        ("python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127", "none of python3.11 python3.10"),
        ("python3", "echo CPython 3.12.1; exit 1", "Found: python3 is CPython 3.12.1;"),
        ("python3", "echo PyPy 3.10.14; exit 1", "Found: python3 is PyPy 3.10.14;"),
    ],
)
def test_the_first_python_that_suits_is_taken_and_others_are_named(tmp_path, name, answer, words):
    def find_python(**variables: str) -> subprocess.CompletedProcess:
        command, env = [str(ROOT / "tools/find_python.sh")], {"PATH": str(tmp_path), **variables}
        return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace")

    program(tmp_path / name, answer)
    found = find_python()
    assert found.returncode == 1 and found.stdout == ""
    assert "missing: Python 3.10 or 3.11" in found.stderr and words in found.stderr and "Remedy:" in found.stderr
    program(tmp_path / "python3.10", f'exec "{sys.executable}" "$@"')
    assert find_python().stdout == "python3.10\n"
    by_hand = find_python(PYTHON="/nowhere/python 3")  # is not replaced by another
    assert by_hand.returncode == 1 and "none of /nowhere/python 3 runs" in by_hand.stderr
