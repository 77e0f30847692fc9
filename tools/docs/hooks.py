"""Hooks of mkdocs: the READMEs of rooms become pages, and links to them lead there.

Pages link to files of the repository, so that no link is dead when a page is read there.
"""

from __future__ import annotations

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Pages that are the README of a room.
READMES = {
    "contributing.md": "CONTRIBUTING.md",
    "benchmark_commands.md": "benchmarks/README.md",
    "main_job.md": "models/README.md",
    "ops.md": "custom_ops/README.md",
    "tests.md": "tests/README.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the READMEs to the files of docs/."""
    for uri, readme in READMES.items():
        files.append(File.generated(config, uri, content=(ROOT / readme).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, uri: str) -> str:
    """The page `uri` with links that lead to pages of the site, where they led to files of the repository."""
    source = READMES.get(uri, f"docs/{uri}")
    pages = {readme: page for page, readme in READMES.items()}

    def link(found: re.Match[str]) -> str:
        path, hash_, anchor = found[1].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = pages.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", link, markdown)
