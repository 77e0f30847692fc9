"""Objects that one clone has compiled serve the next one, and only for equal inputs."""

from __future__ import annotations

import errno
import os
import pathlib
import runpy
import shutil

import pytest

from tools import ops_cache

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = "of requirements and compilers"
ALL = ["a.cc", "b_op.cc", "tensorflow.h"]


@pytest.fixture
def cache(monkeypatch, tmp_path) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/tf_fusedrec"


@pytest.fixture
def clone(tmp_path, monkeypatch, capsys):
    """Returns a function that compiles a small clone as setup.py does: folder -> the sources that were compiled."""
    monkeypatch.setattr("setuptools.setup", lambda **metadata: None)
    compile_objects = runpy.run_path(str(ROOT / "setup.py"))["compile_objects"]

    def make(name: str) -> pathlib.Path:
        folder = tmp_path / name
        texts = {
            ".venv/include/framework.h": "inline int framework() { return 1; }\n",
            "custom_ops/common/tensorflow.h": '#pragma once\n#include "framework.h"\n',
            "custom_ops/a/a.h": "inline int a() { return 2; }\n",
            "custom_ops/a/a.cc": '#include "a/a.h"\nint of_a() { return a(); }\n',
            "custom_ops/b/b_op.cc": "int of_b() { return framework(); }\n",
        }
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        return folder

    def compiled(folder: pathlib.Path) -> list[str]:
        compile_objects.__globals__["ROOT"] = folder
        sources = sorted(path.relative_to(folder) for path in folder.rglob("*.cc"))
        flags = ["g++", f"-isystem{folder}/.venv/include", "-Icustom_ops"]
        capsys.readouterr()
        compile_objects(sources, flags, lambda source: source.stem.endswith("_op"))
        return sorted(line.split("/")[-1] for line in capsys.readouterr().out.splitlines())

    return make, compiled


def lacking(folder: pathlib.Path) -> list[str]:
    restored = {path.name for path in ops_cache.restore(folder, KEY)}
    return [name for name in ("a.cc", "b_op.cc") if name not in restored]


def test_the_next_clone_compiles_what_no_clone_has(cache, clone):
    make, compiled = clone
    first, second = make("first"), make("second")
    assert compiled(first) == ALL and compiled(first) == []
    ops_cache.keep(first, KEY)
    assert not list(cache.rglob("*.gch"))
    shutil.rmtree(first)  # The objects do not depend on the clone that made them.
    assert lacking(second) == [] and compiled(second) == []
    (second / "custom_ops/a/a.h").write_text("inline int a() { return 3; }\n", encoding="utf-8")
    assert compiled(second) == ["a.cc"]
    third = make("third")
    (third / "custom_ops/a/a.h").write_text("inline int a() { return 3; }\n", encoding="utf-8")
    assert lacking(third) == ["a.cc"] and compiled(third) == ["a.cc"]
    ops_cache.keep(second, KEY)
    assert lacking(third) == lacking(make("fourth")) == []
    (third / "custom_ops/common/tensorflow.h").write_text("#pragma once\n#include <framework.h>\n", encoding="utf-8")
    assert "b_op.cc" in lacking(third)
    assert compiled(third) == ["b_op.cc", "tensorflow.h"] and compiled(third) == []
    (third / ".venv/include/framework.h").touch()
    assert compiled(third) == ["b_op.cc", "tensorflow.h"]


def test_a_clone_whose_compiler_has_other_flags_compiles_and_keeps(cache, clone):
    make, compiled = clone
    first, second, third = make("first"), make("second"), make("third")
    compiled(first)
    records = list((first / ops_cache.BUILT).rglob("*.command"))
    commands = [path.read_text(encoding="utf-8") for path in records]
    for path in records:
        path.write_text(path.read_text(encoding="utf-8") + " -O1", encoding="utf-8")
    ops_cache.keep(first, KEY)
    assert lacking(second) == [] and compiled(second) == ALL
    for path, command in zip(records, commands):
        path.write_text(command, encoding="utf-8")
    ops_cache.keep(first, KEY)
    assert lacking(third) == [] and compiled(third) == []


def test_a_name_stands_for_inputs_and_compilers(tmp_path):
    compiler = tmp_path / "g++-of-test"

    def version(text: str) -> str:
        compiler.write_text(f"#!/bin/sh\necho {text}\n", encoding="utf-8")
        compiler.chmod(0o755)
        return ops_cache.key("inputs", [str(compiler), "no-such-compiler"])

    assert version("12.2") == version("12.2") != version("12.3")
    assert ops_cache.key("inputs", []) != ops_cache.key("others", [])


def test_nothing_is_restored_from_an_empty_cache(cache, clone):
    make, _ = clone
    assert lacking(make("first")) == ["a.cc", "b_op.cc"]


def test_a_cache_that_cannot_be_made_is_named_and_stops_nothing(clone, tmp_path, monkeypatch, capsys):
    make, compiled = clone
    folder = make("first")
    compiled(folder)
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lacking(folder) == ["a.cc", "b_op.cc"]
    ops_cache.keep(folder, KEY)
    assert "are not kept in" in capsys.readouterr().out


def test_a_disk_that_fills_leaves_no_half_object(cache, clone, monkeypatch, capsys):
    make, compiled = clone
    first, second = make("first"), make("second")
    compiled(first)
    copyfile = shutil.copyfile

    def full(source: pathlib.Path, target: pathlib.Path) -> None:
        if source.name == "b_op.o" or source.suffix == ".o" and source.is_relative_to(cache):
            pathlib.Path(target).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copyfile(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        ops_cache.keep(first, KEY)
    assert "No space left" in capsys.readouterr().out and "b_op.cc" in lacking(second)
    ops_cache.keep(first, KEY)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        assert lacking(second) == ["a.cc", "b_op.cc"]
    assert "b_op.cc" in compiled(second)
