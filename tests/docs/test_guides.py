"""The guides "how to add" list files that exist and hold the names that the guide mentions."""

import re

import pytest

from tests.docs.commands import ROOT

GUIDES = sorted((ROOT / "docs").glob("add_a*.md"))


def files_table(page):
    """Returns (place, addition) of each row of the first table below "## The files"."""
    table = page.read_text(encoding="utf-8").split("## The files\n", 1)[1].split("\n\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return rows[1:]


def found(place):
    """Returns the file or folder that the first cell of a row names: `path`, or `file` in `folder`."""
    names = re.findall(r"`([^`]+)`", place)
    if re.match(r"`[^`]+` in `", place):
        file, folder = names[:2]
        return list((ROOT / folder).rglob(file))
    return [ROOT / names[0]] if (ROOT / names[0]).exists() else []


@pytest.mark.parametrize("page", [page for page in GUIDES if page.stem != "add_an_op"], ids=lambda page: page.stem)
def test_a_guide_lists_files_that_exist(page):
    rows = files_table(page)
    assert rows
    for place, what in rows:
        assert len(found(place)) == 1, place
        (path,) = found(place)
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"`([A-Za-z_]+)`", what):
                assert name in text or "Lion" in name, f"{path.name} has no {name}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.stem)
def test_files_that_a_page_mentions_exist(page):
    for name in re.findall(
        r"`((?:tf_fusedrec|custom_ops|models|configs|tests|tools|benchmarks)/[\w./]*)`",
        page.read_text(encoding="utf-8"),
    ):
        assert (ROOT / name).exists(), name
