"""Programs with their output, and commands, of README.md, docs/*.md and the READMEs of rooms."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "models/README.md",
    ROOT / "custom_ops/README.md",
    ROOT / "tests/README.md",
]


class Program(NamedTuple):
    code: str
    output: str | None  # the output that the block below shows; "" without such a block, None for a diff


def programs(page: pathlib.Path) -> list[Program]:
    """Returns the python blocks of a page, in their order, and of each diff block the lines after the change.

    A process with tf_keras runs them with tf_keras.
    """
    text = page.read_text(encoding="utf-8")
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        text = text.replace("\nimport keras\n", "\nimport tf_keras as keras\n")
    found = re.findall(r"^```(python|diff)\n(.*?)^```\n(?:\s*^```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE)
    return [Program(*blocks) if form == "python" else Program(after(blocks[0]), None) for form, *blocks in found]


def after(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-")


def commands(page: pathlib.Path) -> list[str]:
    """Returns the lines of a page's bash blocks, without their comments."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.strip()]


def modules_and_flags(page: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Returns every `python -m module --flag ...` of a page, in blocks and in the text."""
    text = page.read_text(encoding="utf-8")
    spoken = re.findall(r"`([^`\n]*python -m [\w.]+[^`\n]*)`", text)
    for command in [*commands(page), *spoken]:
        found = re.search(r"python -m ([\w.]+)(.*)", command)
        if found:
            words = shlex.split(found[2])
            yield found[1], [word.split("=")[0] for word in words if word.startswith("--")]
