"""docs/extending.md lists files that exist and contain the names that the page mentions."""

import re
import subprocess

import pytest

from tests.docs.commands import ROOT

GUIDE = ROOT / "docs/extending.md"
# What a section adds, as a pattern of its name.
EXAMPLES = {"An optimizer": "rowwise_?adam", "A table option": "ttl_?minutes"}
# Pages that tools.docs.generate makes, this guide, the history, and refusals of any options.
LEFT_OUT = ("docs/configuration.md", "docs/gpu.md", "docs/extending.md", "CHANGELOG.md", "tests/cli/test_main.py")
SECTIONS = ("An optimizer", "A table option", "An eviction policy", "A data converter")


def files_table(section):
    """Returns (place, addition) of each row of the table below "| file |" in a section."""
    text = GUIDE.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    table = text.split("| file |", 1)[1].split("\n\n", 1)[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]


def found(place):
    """Returns the file or folder that the first cell of a row names: `path`, or `file` in `folder`."""
    names = re.findall(r"`([^`]+)`", place)
    if re.match(r"`[^`]+` in `", place):
        file, folder = names[:2]
        return list((ROOT / folder).rglob(file))
    return [ROOT / names[0]] if (ROOT / names[0]).exists() else []


@pytest.mark.parametrize("section", SECTIONS)
def test_the_guide_lists_files_that_exist(section):
    rows = files_table(section)
    assert len(rows) >= 3
    for place, what in rows:
        assert len(found(place)) == 1, place
        (path,) = found(place)
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"`([A-Za-z_]+)`", what):
                assert name in text, f"{path.name} has no {name}"


@pytest.mark.parametrize(("section", "name"), EXAMPLES.items())
def test_the_guide_lists_every_file_that_an_example_needed(section, name):
    tracked = subprocess.run(
        ["git", "grep", "-liE", name, "--", ".", *(f":!{page}" for page in LEFT_OUT)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {*tracked.stdout.split()} == {str(found(place)[0].relative_to(ROOT)) for place, _ in files_table(section)}
