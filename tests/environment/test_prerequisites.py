"""The first checks of `make` name each missing prerequisite with its remedy."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tools import horovod_wheel, prerequisites
from tools.steps import StepFailed

ROOT = pathlib.Path(__file__).resolve().parents[2]


def script(folder: pathlib.Path, name: str, text: str) -> pathlib.Path:
    """Writes an executable shell script `name` into `folder`, which replaces the real program."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def find_python(path: pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "tools/find_python.sh")],
        env={"PATH": str(path), **variables},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def test_the_first_suitable_python_is_taken(tmp_path):
    # pyenv puts shims of missing versions on PATH, which fail.
    script(tmp_path, "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    script(tmp_path, "python3.10", f'exec "{sys.executable}" "$@"')
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (0, "python3.10\n")


@pytest.mark.parametrize("answer", ["CPython 3.12.1", "CPython 3.9.18", "PyPy 3.10.14"])
def test_an_unsuitable_python_is_named(tmp_path, answer):
    script(tmp_path, "python3", f"echo '{answer}'; exit 1")
    found = find_python(tmp_path)
    assert found.returncode == 1 and found.stdout == ""
    assert "missing: Python 3.10 or 3.11" in found.stderr
    assert f"Found: python3 is {answer};" in found.stderr
    assert "apt install python3 python3-venv" in found.stderr


def test_no_python_at_all(tmp_path):
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert "none of python3.11 python3.10 python3 runs" in found.stderr


def test_a_python_chosen_by_hand_is_not_replaced_by_another(tmp_path):
    script(tmp_path, "python3.11", f'exec "{sys.executable}" "$@"')
    found = find_python(tmp_path, PYTHON="/nowhere/python 3")
    assert found.returncode == 1
    assert "none of /nowhere/python 3 runs" in found.stderr


def test_the_real_version_check_refuses_other_versions(tmp_path):
    """Runs the probe with a replaced Python version."""
    text = (ROOT / "tools/find_python.sh").read_text(encoding="utf-8")
    probe = text.split("probe='")[1].split("'\n")[0]
    for version, suitable in {(3, 9): False, (3, 10): True, (3, 11): True, (3, 12): False}.items():
        faked = f"import sys; sys.version_info = {version}\n{probe}"
        done = subprocess.run([sys.executable, "-c", faked], capture_output=True)
        assert (done.returncode == 0) == suitable, version


def test_missing_programs_stop_the_set_up_before_anything_is_made(tmp_path):
    """Runs the whole set-up in an empty clone with an empty PATH."""
    shutil.copytree(ROOT / "tools", tmp_path / "clone/tools")
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tools.setup_env"],
        cwd=tmp_path / "clone",
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert done.returncode == 1
    assert "missing: a C++ compiler; g++ is not on PATH.\n  Remedy: Debian, Ubuntu: apt install g++" in done.stderr
    for name in ("make", "patch"):
        assert f"missing: {name} is not on PATH.\n  Remedy: Debian, Ubuntu: apt install {name}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "clone/.venv").exists()


def test_one_process_needs_no_patch(tmp_path, monkeypatch):
    script(tmp_path, "make", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(script(tmp_path, "g++", "exit 0")))
    assert prerequisites.missing(ROOT, tmp_path, fresh=False, horovod=False) == []
    (message,) = prerequisites.missing(ROOT, tmp_path, fresh=False, horovod=True)
    assert message.startswith("missing: patch is not on PATH.")


def test_a_compiler_without_cxx17(tmp_path, monkeypatch):
    old = script(tmp_path, "g++", "echo \"g++: error: unrecognized command-line option '-std=c++17'\"; exit 1")
    (message,) = prerequisites.check_compiler(str(old))
    assert "missing: C++17" in message and "unrecognized command-line option" in message
    assert "apt install g++" in message


def test_the_compiler_here_is_good():
    assert prerequisites.check_compiler(os.environ.get("CXX", "g++")) == []


@pytest.mark.parametrize("machine", [("Darwin", "arm64"), ("Linux", "ppc64le"), ("Windows", "AMD64")])
def test_another_machine(machine):
    (message,) = prerequisites.check_machine(*machine)
    assert f"this is {machine[0]} on {machine[1]}" in message and "Remedy:" in message


def test_a_path_with_a_blank():
    (message,) = prerequisites.check_path(pathlib.Path("my clones/one"))
    assert "missing: a path without blanks; this clone lies in 'my clones/one'" in message and "Remedy:" in message


def test_no_venv_module(monkeypatch):
    monkeypatch.setattr(prerequisites.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    (message,) = prerequisites.check_venv_module()
    assert "missing: the module ensurepip" in message
    assert f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv" in message


def test_too_little_disk_adds_up_what_lies_on_one_file_system(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    one, other = tmp_path / "not/yet/there", tmp_path
    assert prerequisites.check_disk([(one, free * 0.6)]) == []
    (message,) = prerequisites.check_disk([(one, free * 0.6), (other, free * 0.6)])
    assert "missing: disk space" in message and "GiB free" in message and "Remedy: make room" in message


@pytest.mark.parametrize(
    ("answer", "words"),
    [("cmake version 4.1.0", "cmake version 4.1.0"), ("cmake version 3.7.2", "3.7.2"), (None, "none")],
)
def test_no_cmake_that_can_build_horovod(tmp_path, answer, words):
    if answer is not None:
        script(tmp_path, "cmake", f"echo '{answer}'")
    with pytest.raises(StepFailed, match="missing: cmake >= 3.13, < 4") as raised:
        horovod_wheel.check_cmake({"PATH": str(tmp_path)})
    assert words in str(raised.value) and "Remedy: remove .venv" in str(raised.value)


def test_cmake_that_can_build_horovod(tmp_path):
    script(tmp_path, "cmake", "echo 'cmake version 3.31.10'")
    horovod_wheel.check_cmake({"PATH": str(tmp_path)})
