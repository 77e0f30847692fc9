"""Hooks of mkdocs: pages and pictures that are made when the site is built, and lie nowhere else."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks import plots
from tools.docs import configuration, drawings

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Pages that are the README of a room.
READMES = {
    "data.md": "tf_fusedrec/data/README.md",
    "main_job.md": "models/README.md",
    "ops.md": "custom_ops/README.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is generated to the files of docs/."""
    for uri, readme in READMES.items():
        files.append(File.generated(config, uri, content=(ROOT / readme).read_text(encoding="utf-8")))
    files.append(File.generated(config, "configuration.md", content=configuration.page()))
    for name, drawing in drawings.all_drawings().items():
        files.append(File.generated(config, f"img/{name}", content=drawing))
    for name, plot in plots.kept_plots().items():
        files.append(File.generated(config, f"img/{name}.svg", content=plot))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the recorded timelines, docs/img/timeline_*.png, where a page asks for them."""
    return markdown.replace("<!-- timelines -->", timelines(file.src_uri for file in files))


def timelines(uris: Iterable[str]) -> str:
    """Markdown of the pictures among files, each under the name of its schedule."""
    pictures = sorted(uri for uri in uris if re.fullmatch(r"img/timeline_\w+\.png", uri))
    names = [uri[len("img/timeline_") : -len(".png")].replace("_", " ") for uri in pictures]
    return "\n\n".join(f"A recorded step, {name}:\n\n![{name}]({uri})" for name, uri in zip(names, pictures))
