"""What one clone has compiled serves the next one, and only for equal inputs."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from tools import object_cache
from tools.object_cache import Output

TEXTS = {"a.h": "inline int a() { return 2; }\n", "a.cc": '#include "a.h"\nint of_a() { return a(); }\n'}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns a function that compiles a.cc of a clone: folder -> object, and whether the compiler ran."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo ran >> {log}\nexec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(clone: str, *flags: str, **more: str) -> tuple[pathlib.Path, bool]:
        root = tmp_path / clone
        if not root.exists():
            root.mkdir()
            for name, text in TEXTS.items():
                (root / name).write_text(text, encoding="utf-8")
        log.write_text("", encoding="utf-8")
        output = Output(root, [str(compiler), f"-I{root}", "-c", *flags], [pathlib.Path("a.cc")], ".o", **more).make()
        return output, log.read_text(encoding="utf-8") != ""

    return make


def test_equal_inputs_are_compiled_once_for_all_clones(made, tmp_path):
    first, ran = made("first")
    assert ran and made("first") == (first, False)
    shutil.rmtree(tmp_path / "first")  # The object does not depend on the clone that made it.
    assert made("second") == (first, False)
    os.utime(tmp_path / "second/a.cc")
    assert made("second") == (first, False)


@pytest.mark.parametrize("name", TEXTS)
def test_a_change_of_source_or_header_is_compiled_and_the_state_before_is_kept(made, tmp_path, name):
    first, _ = made("clone")
    (tmp_path / "clone" / name).write_text(TEXTS[name].replace("int", "long"), encoding="utf-8")
    changed, ran = made("clone")
    assert ran and changed != first
    (tmp_path / "clone" / name).write_text(TEXTS[name], encoding="utf-8")
    assert made("clone") == (first, False)


def test_other_flags_frameworks_and_compilers_are_compiled(made, tmp_path):
    outputs = {made("clone")[0], made("clone", "-O1")[0], made("clone", framework="2.21")[0]}
    compiler = tmp_path / "compiler"
    compiler.write_text(compiler.read_text(encoding="utf-8").replace("exec", "echo newer\nexec"), encoding="utf-8")
    object_cache.version.cache_clear()
    outputs.add(made("clone")[0])
    assert len(outputs) == 4


def test_a_cache_that_cannot_be_made_is_replaced_by_the_clone(made, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    output, ran = made("clone")
    assert ran and output.is_relative_to(tmp_path / "clone/build") and made("clone") == (output, False)
