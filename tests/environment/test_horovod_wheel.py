"""Horovod's cached wheel is built once and atomically, also when two clones need it at once."""

import hashlib
import importlib.metadata
import multiprocessing
import os
import pathlib
import platform
import subprocess
import sys
import time

import pytest

from tools import horovod_wheel
from tools.steps import StepFailed, clean_environment, run_logged

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = "horovod-0-tensorflow-0-cp311-g++12-x86_64"


def fake_build(command, log, cwd, env, progress):
    """Replaces run_logged: writes a wheel slowly and counts the builds."""
    folder = pathlib.Path(command[command.index("--wheel-dir") + 1])
    with (pathlib.Path(env["COUNT"])).open("a", encoding="utf-8") as stream:
        stream.write("built\n")
    (folder / "horovod-0-cp311.whl").write_bytes(b"half")
    time.sleep(0.5)
    (folder / "horovod-0-cp311.whl").write_bytes(b"whole")
    return 0.5


def fake_sources(root, python, folder, env):
    (folder / "horovod-0").mkdir()
    return folder / "horovod-0"


def ask(cache: str, count: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    horovod_wheel.run_logged = fake_build
    horovod_wheel.check_cmake = lambda env: None
    horovod_wheel.patched_sources = fake_sources
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
    monkeypatch.setattr(horovod_wheel, "patched_sources", fake_sources)
    left_behind = tmp_path / f"tf_fusedrec/unfinished-{KEY}-x"
    left_behind.mkdir(parents=True)
    (left_behind / "horovod-0-cp311.whl").write_bytes(b"half")

    def fail(command, log, cwd, env, progress):
        raise StepFailed("planned")

    monkeypatch.setattr(horovod_wheel, "run_logged", fail)
    with pytest.raises(StepFailed, match="planned"):
        horovod_wheel.wheel(ROOT, pathlib.Path("python"), KEY, {})
    assert [path.name for path in (tmp_path / "tf_fusedrec").iterdir()] == [f"{KEY}.lock"]


def test_a_killed_set_up_is_waited_for_while_its_command_lives(tmp_path):
    """Simulates a set-up that dies at once (as by SIGKILL) while its command runs for two more seconds."""
    program = (
        "import os, pathlib, threading; from tools import horovod_wheel, steps\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "threading.Timer(0.7, lambda: os._exit(9)).start()\n"
        "with horovod_wheel.locked(folder / 'lock', ''):\n"
        "    steps.run_logged(['sh', '-c', 'sleep 2; echo > done'], folder / 'log', folder, dict(os.environ))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert killed.returncode == 9 and not (tmp_path / "done").exists()
    with horovod_wheel.locked(tmp_path / "lock", "waiting"):
        assert (tmp_path / "done").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StepFailed, match="cannot be kept in .*file/tf_fusedrec.*\n.*set XDG_CACHE_HOME"):
        horovod_wheel.wheel(ROOT, pathlib.Path("python"), KEY, {})


def test_the_key_names_all_that_the_binary_depends_on():
    key = horovod_wheel.cache_key(ROOT, "3.11.7", "2.16.2")
    horovod, rest = key.split("-tensorflow-")
    patch = hashlib.sha256(horovod_wheel.PATCH.read_bytes()).hexdigest()[:8]
    assert horovod == f"horovod-{horovod_wheel.pinned('horovod', ROOT / 'requirements/horovod.txt')}-{patch}"
    assert rest.startswith("2.16.2-cp311-")


def test_a_failed_command_shows_the_tail_of_its_log_and_where_it_lies(tmp_path):
    log = tmp_path / "logs/build.log"
    command = [
        "sh",
        "-c",
        "echo 'a.cc:3: error: no such type'; for i in $(seq 100); do echo line $i; done; echo the reason >&2; exit 3",
    ]
    with pytest.raises(StepFailed) as raised:
        run_logged(command, log, tmp_path, dict(os.environ))
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


def test_the_command_installs_the_wheel_for_the_tensorflow_here(monkeypatch, capsys):
    built, installed = [], []
    monkeypatch.setattr(horovod_wheel, "wheel", lambda root, python, key, env: built.append(key) or "horovod.whl")
    monkeypatch.setattr(horovod_wheel, "install", lambda root, python, found, env: installed.append((python, found)))
    assert horovod_wheel.main() == 0
    tensorflow = importlib.metadata.version("tensorflow")
    assert built == [horovod_wheel.cache_key(ROOT, platform.python_version(), tensorflow)]
    assert installed == [(pathlib.Path(sys.executable), "horovod.whl")]


def test_the_command_without_a_compiler_and_patch_names_both(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert horovod_wheel.main() == 1
    told = capsys.readouterr().err
    assert "missing: a C++ compiler; g++ is not on PATH.\n  Remedy: " in told
    assert "missing: patch is not on PATH.\n  Remedy: " in told


def test_the_command_without_tensorflow_names_the_remedy(monkeypatch, capsys):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert horovod_wheel.main() == 1
    assert "compiled against TensorFlow, but" in capsys.readouterr().err
