"""The set-up repeats changed and interrupted steps only."""

import contextlib
import os
import pathlib
import time

import pytest

from tools import setup_env, steps
from tools.steps import StepFailed, run_beside


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
    for kind in ("runtime", "development"):
        setup_env.stamp(kind, setup_env.requirements_digest(kind, "3.11.7"))
    setup_env.stamp("horovod", setup_env.horovod_key("3.11.7"))
    setup_env.stamp("package", setup_env.package_digest("3.11.7"))
    return tmp_path


def test_nothing_to_do(clone):
    assert setup_env.is_complete()


@pytest.mark.parametrize(
    "name",
    ["requirements/runtime.txt", "requirements/dev.txt", "requirements/horovod.txt", "setup.py", "custom_ops/a/a.h"],
)
def test_a_changed_file_is_noticed_by_its_content(clone, name):
    path: pathlib.Path = clone / name
    path.touch()
    assert setup_env.is_complete()
    path.write_text("tensorflow==3\nhorovod==2\n", encoding="utf-8")
    assert not setup_env.is_complete()


def test_new_and_renamed_sources_are_noticed(clone):
    (clone / "custom_ops/a/a.cc").rename(clone / "custom_ops/a/b.cc")
    assert not setup_env.is_complete()


@pytest.mark.parametrize("name", ["FUSEDREC_CUDA", "FUSEDREC_CUDA_ARCHS", "CXX", "NVCC"])
def test_another_wish_for_the_compilers_is_noticed(clone, monkeypatch, name):
    before = setup_env.package_digest("3.11.7")
    monkeypatch.setenv(name, "another")
    assert setup_env.package_digest("3.11.7") != before


def test_a_gpu_driver_installed_later_is_noticed(clone, monkeypatch):
    driver = clone / "programs/nvidia-smi"
    driver.parent.mkdir()
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    setup_env.stamp("package", setup_env.package_digest("3.11.7"))
    assert setup_env.is_complete()
    driver.write_text("#!/bin/sh\n", encoding="utf-8")
    driver.chmod(0o755)
    assert not setup_env.is_complete()


def test_a_removed_library_is_noticed(clone):
    (clone / "ops.so").unlink()
    assert not setup_env.is_complete()


def test_an_installation_that_was_broken_off_is_made_afresh(clone):
    setup_env.INSTALLING.touch()
    assert setup_env.venv_version() is None


def test_a_virtual_environment_that_was_copied_here_is_not_used(clone):
    (clone / ".venv/bin/pip").write_text("#!/elsewhere/.venv/bin/python3.11\nimport re\n", encoding="utf-8")
    assert setup_env.venv_version() is None


def test_a_python_chosen_by_hand_replaces_another(clone, monkeypatch):
    monkeypatch.setenv("PYTHON", "python3.10")
    monkeypatch.setattr(setup_env, "running_version", lambda: "3.10.13")
    assert not setup_env.is_complete()
    monkeypatch.setattr(setup_env, "running_version", lambda: "3.11.7")
    assert setup_env.is_complete()


def test_training_on_one_process_needs_neither_horovod_nor_tools(clone):
    for step in ("horovod", "development"):
        (setup_env.STAMPS / step).unlink()
    assert setup_env.is_complete(setup_env.for_training(1))
    assert not setup_env.is_complete(setup_env.for_training(2)) and not setup_env.is_complete()
    (setup_env.STAMPS / "runtime").unlink()
    assert not setup_env.is_complete(setup_env.for_training(1))


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (setup_env.EVERYTHING, ["runtime", "compiler", "development", "horovod", "compiled", "package"]),
        (setup_env.for_training(2), ["runtime", "compiler", "horovod", "compiled", "package"]),
        (setup_env.for_training(1), ["runtime", "compiler", "compiled", "package"]),
    ],
)
def test_the_compiler_runs_beside_the_steps_that_need_no_ops(clone, monkeypatch, wanted, steps):
    done = []

    @contextlib.contextmanager
    def compile_beside(version):
        done.append("compiler")
        yield
        done.append("compiled")

    monkeypatch.setattr(setup_env, "compile_beside", compile_beside)
    monkeypatch.setattr(setup_env, "install_requirements", lambda kind, version: done.append(kind))
    for step in ("horovod", "package"):
        monkeypatch.setattr(setup_env, f"install_{step}", lambda version, step=step: done.append(step))
    setup_env.set_up(wanted)
    assert done == steps


def test_a_command_beside_runs_while_the_body_runs_and_its_failure_comes_after(tmp_path):
    waits = ["sh", "-c", "until [ -e go ]; do sleep 0.02; done; echo done > end"]
    with run_beside(waits, tmp_path / "log", tmp_path, dict(os.environ)):
        (tmp_path / "go").touch()
    assert (tmp_path / "end").read_text(encoding="utf-8") == "done\n"
    body = []
    with (
        pytest.raises(StepFailed, match="the reason"),
        run_beside(["sh", "-c", "echo the reason; exit 3"], tmp_path / "log", tmp_path, dict(os.environ)),
    ):
        body.append("done")
    assert body


def test_a_failed_body_ends_the_command_beside_it(tmp_path):
    hangs = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
    with pytest.raises(StepFailed, match="planned"), run_beside(hangs, tmp_path / "log", tmp_path, dict(os.environ)):
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text(encoding="utf-8").strip()):
            time.sleep(0.02)
        raise StepFailed("planned")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), 0)


@pytest.mark.parametrize("edited", [False, True])
def test_objects_of_sources_that_were_edited_meanwhile_are_not_kept(clone, monkeypatch, edited):
    (clone / "ops.so").unlink()
    kept = []
    monkeypatch.setattr(setup_env, "LOGS", clone / "build/setup")
    monkeypatch.setattr(setup_env.ops_cache, "restore", lambda root, build: False)
    monkeypatch.setattr(setup_env.ops_cache, "keep", lambda root, build: kept.append(root))
    monkeypatch.setattr(setup_env, "run_beside", lambda *arguments: contextlib.nullcontext())
    with setup_env.compile_beside("3.11.7"):
        if edited:
            (clone / "custom_ops/a/a.cc").write_text("edited", encoding="utf-8")
    assert kept == ([] if edited else [clone])


@pytest.mark.parametrize("given", ["zwei", "0", "-1", ""])
def test_a_number_of_processes_that_is_none_is_refused_before_anything_changes(monkeypatch, capsys, given):
    monkeypatch.setattr(setup_env.sys, "argv", ["setup_env", f"--train={given}"])
    monkeypatch.setattr(setup_env.horovod_wheel, "locked", lambda *_: pytest.fail("the set-up began"))
    assert setup_env.main() == 2
    assert capsys.readouterr().err == f"error: NP must be a number of processes >= 1, got {given!r}.\n"


def test_a_long_line_of_progress_ends_with_dots_behind_a_whole_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "PROGRESS_S", 0.0)
    (tmp_path / "log").write_text("Installing collected packages: " + "flatbuffers, " * 20, encoding="utf-8")
    steps.Progress(tmp_path / "log", r"\S.*").show()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("      0 s  Installing collected packages: flatbuffers, ")
    assert line.endswith("flatbuffers, ...") and len(line) <= 11 + steps.WIDTH
