"""Programs with their output, and commands, of README.md, docs/*.md and the READMEs of rooms."""

from __future__ import annotations

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
    output: str  # the output that the block below shows; "" without such a block


def programs(page: pathlib.Path) -> list[Program]:
    """Returns the python blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE)
    return [Program(*blocks) for blocks in found]


def diffs(page: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the added lines, and all lines that are there after it, of each diff block of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    return [
        ("\n".join(line[1:] for line in block if line[:1] == "+"), "\n".join(x[1:] for x in block if x[:1] != "-"))
        for block in blocks
    ]


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
