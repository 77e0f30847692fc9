"""Horovod's cached wheel is built once and atomically, also when two clones need it at once."""

import importlib.metadata
import multiprocessing
import os
import pathlib
import time

import pytest

from tests.support.shared import ROOT
from tools import horovod_wheel
from tools.steps import StepFailed, clean_environment, run_logged

KEY = "horovod-0-tensorflow-0-g++12-x86_64"


def fake_build(root, python, folder, env):
    """Writes a wheel slowly and counts the builds."""
    with (pathlib.Path(env["COUNT"])).open("a", encoding="utf-8") as stream:
        stream.write("built\n")
    (folder / "horovod-0-py3.whl").write_bytes(b"half")
    time.sleep(0.5)
    (folder / "horovod-0-py3.whl").write_bytes(b"whole")
    return 0.5


def ask(cache: str, count: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    horovod_wheel.build = fake_build
    horovod_wheel.check_cmake = lambda env: None
    wheel = horovod_wheel.wheel(ROOT, pathlib.Path("python"), KEY, {"COUNT": count})
    assert wheel.read_bytes() == b"whole"


def test_two_clones_at_once_build_one_wheel_and_both_get_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "count"))
    clones = [context.Process(target=ask, args=arguments) for _ in range(3)]
    for clone in clones:
        clone.start()
    for clone in clones:
        clone.join(60)
    assert [clone.exitcode for clone in clones] == [0, 0, 0]
    assert (tmp_path / "count").read_text(encoding="utf-8") == "built\n"
    kept = tmp_path / "cache/tf_fusedrec"
    assert sorted(path.name for path in kept.iterdir()) == [KEY, f"{KEY}.lock"]


def test_a_failed_build_leaves_nothing_and_what_a_killed_one_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(horovod_wheel, "check_cmake", lambda env: None)
    left_behind = tmp_path / f"tf_fusedrec/unfinished-{KEY}-x"
    left_behind.mkdir(parents=True)
    (left_behind / "horovod-0-py3.whl").write_bytes(b"half")

    def fail(root, python, folder, env):
        raise StepFailed("planned")

    monkeypatch.setattr(horovod_wheel, "build", fail)
    with pytest.raises(StepFailed, match="planned"):
        horovod_wheel.wheel(ROOT, pathlib.Path("python"), KEY, {})
    assert [path.name for path in (tmp_path / "tf_fusedrec").iterdir()] == [f"{KEY}.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StepFailed, match="cannot be kept in .*file/tf_fusedrec.*\n.*set XDG_CACHE_HOME"):
        horovod_wheel.wheel(ROOT, pathlib.Path("python"), KEY, {})


def test_a_failed_command_shows_the_tail_of_its_log_and_where_it_lies(tmp_path):
    log = tmp_path / "logs/build.log"
    shell = (
        "echo 'a.cc:3: error: no such type'; for i in $(seq 100); do echo line $i; done; echo the reason >&2; exit 3"
    )
    with pytest.raises(StepFailed) as raised:
        run_logged(["sh", "-c", shell], log, tmp_path, dict(os.environ))
    message = str(raised.value)
    assert "| a.cc:3: error: no such type\n      | ...\n" in message
    assert "| the reason" in message and "| line 100" in message and "line 50" not in message
    assert "ended with 3" in message and f"The whole log: {log}" in message


def test_the_users_variables_do_not_lead_the_builds_astray(tmp_path, monkeypatch):
    for name in ("HOROVOD_WITH_MPI", "MAKEFLAGS", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    env = clean_environment(tmp_path)
    assert not {"HOROVOD_WITH_MPI", "MAKEFLAGS", "PYTHONPATH"} & set(env)
    assert env["PATH"].startswith(f"{tmp_path}/bin:")


def test_the_command_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"(?s)^missing: a C\+\+ compiler; g\+\+ .*\n  Remedy: .*missing: patch .*\n  Remedy: "
    ):
        horovod_wheel.main()

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(SystemExit, match="compiled against TensorFlow, but .* Remedy: pip install"):
        horovod_wheel.main()


@pytest.mark.parametrize(
    ("answer", "words"), [("4.1.0", "reports .*4.1.0"), ("3.7.2", "reports .*3.7.2"), (None, "none")]
)
def test_only_a_cmake_that_can_build_horovod_is_taken(tmp_path, answer, words):
    cmake: pathlib.Path = tmp_path / "cmake"
    if answer is not None:
        cmake.write_text(f"#!/bin/sh\necho cmake version {answer}\n", encoding="utf-8")
        cmake.chmod(0o755)
    with pytest.raises(StepFailed, match=f"missing: cmake >= 3.13, < 4.*{words}.*\n  Remedy: remove .venv"):
        horovod_wheel.check_cmake({"PATH": str(tmp_path)})
    cmake.write_text("#!/bin/sh\necho cmake version 3.31.10\n", encoding="utf-8")
    cmake.chmod(0o755)
    horovod_wheel.check_cmake({"PATH": str(tmp_path)})
