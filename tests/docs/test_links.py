"""No link and no picture of a page is dead when the page is read in the repository, without the site."""

import pathlib
import re
import subprocess

import pytest

from tests.docs.commands import ROOT

TRACKED = frozenset(
    subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout.splitlines()
)
PAGES = sorted(path for path in TRACKED if path.endswith(".md"))
FOLDERS = {str(parent) for path in TRACKED for parent in pathlib.PurePosixPath(path).parents}


def targets(markdown):
    """Returns the targets of a page's links and pictures, without code, other sites and places inside the page."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", markdown, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)", text)
    found += re.findall(r"<(?:img|a)\s[^>]*(?:src|href)=\"([^\"]+)\"", text)
    found += re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, re.MULTILINE)
    return [target.split("#")[0] for target in found if not re.match(r"[a-z]+:|#", target)]


def test_targets_are_found_in_every_form():
    page = 'a [x](a.md#part) ![y](img/b.png) <img src="c.svg"> [z][1] [w](https://x.org/d.md) `[k](no.md)`\n[1]: e.md\n'
    assert targets(page) == ["a.md", "img/b.png", "c.svg", "e.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_target_is_in_the_repository(page):
    folder = (ROOT / page).parent
    dead = []
    for target in targets((ROOT / page).read_text(encoding="utf-8")):
        path = (folder / target).resolve()
        inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).as_posix()
        if inside not in TRACKED and inside not in FOLDERS:
            dead.append(target)
    assert not dead


def test_every_page_is_in_the_index_and_in_the_navigation():
    pages = {pathlib.PurePosixPath(page).name for page in PAGES if re.fullmatch(r"docs/\w+\.md", page)}
    linked = set(targets((ROOT / "docs/index.md").read_text(encoding="utf-8")))
    in_navigation = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert pages - {"index.md"} <= linked
    assert pages <= in_navigation


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/extending.md"])
def test_files_that_a_page_mentions_exist(page):
    for name in re.findall(r"`((?:tf_fusedrec|custom_ops|models|configs|tests|tools|benchmarks)/[\w./]*)`",
                           (ROOT / page).read_text(encoding="utf-8")):  # fmt: skip
        assert (ROOT / name).exists(), name
