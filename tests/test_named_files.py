"""Comments, docstrings and op documentation name only files that exist."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOMS = ("custom_ops", "tf_fusedrec", "models", "benchmarks", "examples", "tests", "tools")
SOURCES = (".cc", ".h", ".cu", ".cuh", ".py")
# Folders that names are relative to, beside the folder of the file that names them.
BASES = ("", "custom_ops", "tf_fusedrec", "tests", "tests/cuda", "benchmarks")
# No match inside a pattern: names that a wildcard or a placeholder precedes or follows.
NAME = re.compile(r"(?<![\w/.*<>{}$-])([A-Za-z]\w*(?:[/.-]\w+)*\.(?:cc|cuh|cu|h|py))(?![\w*/{(])")
# Files outside the repository: a header of CUDA, and an export in a user's folder.
FOREIGN = {"cuda_fp16.h", "exports/1-to-2/apply_delta.py"}


def python_words(text: str) -> list[str]:
    comments = []
    # Tokens take long, so that only a source whose lines may name a file in a comment is cut into them.
    if any(NAME.search(line.partition("#")[2]) for line in text.splitlines() if "#" in line):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return comments + [ast.get_docstring(node) or "" for node in nodes]


def cpp_words(text: str) -> list[str]:
    return re.findall(r"//.*", text) + re.findall(r'R"doc\((.*?)\)doc"', text, re.DOTALL)


def named_files(text: str, suffix: str) -> list[str]:
    """Returns the names of files in the comments and the documentation of a source."""
    words = python_words(text) if suffix == ".py" else cpp_words(text)
    return [name for name in NAME.findall("\n".join(words)) if name not in FOREIGN]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Returns the names, without folders, of all files that a comment may name."""
    return {path.name for room in ROOMS for path in (ROOT / room).rglob("*.*")} | {path.name for path in ROOT.iterdir()}


@pytest.mark.parametrize("room", ROOMS)
def test_named_files_exist(room, known):
    missing = []
    for path in sorted(path for path in (ROOT / room).rglob("*") if path.suffix in SOURCES):
        for name in named_files(path.read_text(encoding="utf-8"), path.suffix):
            found = any((base / name).exists() for base in (path.parent, *(ROOT / base for base in BASES)))
            if not found and ("/" in name or name not in known):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "named, but not found:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("text", "suffix", "names"),
    [
        ("// The layout stands in hash_table/records.cc.\nint x;", ".cc", ["hash_table/records.cc"]),
        ('.Doc(R"doc(\nSee gone.h.\n)doc")', ".cc", ["gone.h"]),
        ('#include "gone.h"\n', ".cc", []),
        ('"""As gone.py has it (and a/b.cc)."""\n', ".py", ["gone.py", "a/b.cc"]),
        ("x = 1  # as in engine.inc.h; *_op.cc and <op>.cc are patterns\n", ".py", ["engine.inc.h"]),
    ],
)
def test_names_are_read_from_comments_and_documentation(text, suffix, names):
    assert named_files(text, suffix) == names
