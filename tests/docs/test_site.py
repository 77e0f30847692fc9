"""The site builds without a warning, pages need no network, and generated parts are current."""

import dataclasses
import importlib
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from tests.docs.commands import ROOT
from tf_fusedrec import ops, tf
from tools.docs import configuration, drawings, generate, hooks

RECORDS = [(path, name) for _, _, path, names in configuration.SECTIONS for name in names]


def test_the_site(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, check=True, timeout=300,
    )  # fmt: skip
    assert "max_rows" in (tmp_path / "configuration.html").read_text(encoding="utf-8")
    assert "accumulate_steps" in (tmp_path / "api/embedding.html").read_text(encoding="utf-8")
    assert {"message.svg", "table.svg", "schedules.svg", "topology.svg"} <= {
        p.name for p in (tmp_path / "img").iterdir()
    }
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, page.name


@pytest.mark.parametrize(("path", "name"), RECORDS, ids=[name for _, name in RECORDS])
def test_fields_and_defaults_are_those_of_the_dataclass(path, name):
    files = [file.relative_to(ROOT).with_suffix("").parts for file in configuration.files_of(path)]
    modules = [importlib.import_module(".".join(parts)) for parts in files]
    record = next(getattr(module, name) for module in modules if hasattr(module, name))
    (found,) = [one for one in configuration.records_of(configuration.files_of(path)) if one.name == name]
    wanted = {field.name: field for field in dataclasses.fields(record)}
    assert [field.name for field in found.fields] == list(wanted)
    namespace = vars(importlib.import_module(record.__module__))
    for field in found.fields:
        make = wanted[field.name].default_factory
        default = wanted[field.name].default if make is dataclasses.MISSING else make()
        if field.default:
            assert eval(field.default, dict(namespace)) == default, field.name
        else:
            assert default is dataclasses.MISSING, field.name


def test_constants_are_spelled_out():
    page = configuration.page()
    assert not re.search(r"\bone of (?:\w+\.)*[A-Z][A-Z_]{3,}\b", page)


def test_the_drawing_of_the_message_shows_what_the_ops_answer():
    example = {name: np.array(numbers) for name, numbers in drawings.EXAMPLE.items()}
    unique = ops.segment_unique(tf.constant(example["ids"]), tf.constant(example["segment_splits"]))
    ranked = ops.rank_partition(unique.ids, unique.splits, num_ranks=len(example["send_splits"]))
    got = {
        "unique_ids": unique.ids, "unique_splits": unique.splits, "inverse": unique.inverse,
        "message": ranked.message[: len(example["message"])], "send_splits": ranked.send_splits,
        "restore": ranked.restore,
    }  # fmt: skip
    for name, tensor in got.items():
        np.testing.assert_array_equal(tensor, example[name], err_msg=name)


def test_generated_files_are_current():
    for name, made in generate.generated().items():
        kept = (ROOT / name).read_text(encoding="utf-8")
        remedy = f"{name} is not what `python -m tools.docs.generate` makes: run it, and commit what it writes"
        if name.endswith(".svg") and f"Matplotlib v{matplotlib.__version__}," not in kept:
            # Another release moves items by a hair; the words are equal.
            made, kept = (re.findall(r"<text.*?>(.*?)</text>", svg) for svg in (made, kept))
        assert made == kept, remedy


def test_links_to_files_of_the_repository_lead_to_pages_of_the_site():
    page = "[a](../models/README.md) [b](tables.md#x) ![c](img/table.svg) [d](https://x.org/a.md) [e](#here)"
    assert hooks.site_links(page, "index.md") == page.replace("../models/README.md", "main_job.md")
    readme = "[a](../custom_ops/README.md) [b](../docs/tables.md#rows)"
    assert hooks.site_links(readme, "main_job.md") == "[a](ops.md) [b](tables.md#rows)"
    assert (
        hooks.site_links("[a](../../models/README.md) [b](data.md)", "api/x.md") == "[a](../main_job.md) [b](data.md)"
    )
