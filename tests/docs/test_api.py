"""docs/api is the list of public names: each is on one page and in an example; programs of pages use no others."""

import ast
import doctest
import importlib
import json
import re
import sys
import types

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.docs.commands import PAGES, ROOT, programs
from tests.support.prediction_log import message_class

ROOMS = (
    "callbacks", "checkpoint", "collectives", "data", "layers", "losses", "metrics", "optimizers", "saved_model",
    "schedules", "tfra",
)  # fmt: skip
OTHERS = {"keras", "tf", *ROOMS}  # names of fr that are modules
BY_PAGE = {
    page.stem: re.findall(r"^::: tf_fusedrec\.(\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for page in sorted((ROOT / "docs/api").glob("*.md"))
}
DOCUMENTED = [name for names in BY_PAGE.values() for name in names]


def names_of(room):
    names = importlib.import_module(f"tf_fusedrec.{room}").__all__
    return {f"{room}.{name}" for name in names} - {"tfra.dynamic_embedding"}  # a module with TFRA's names


@pytest.mark.legacy  # imports tfra
def test_each_public_name_is_on_one_page():
    in_rooms = {name for room in ROOMS for name in names_of(room)}
    assert sorted(DOCUMENTED) == sorted({*fr.__all__} - OTHERS | in_rooms)
    assert {"keras", "tf", *ROOMS} - {"tfra"} <= {*fr.__all__}  # TFRA is an extra


def test_public_names_are_few_and_have_one_path():
    assert len(DOCUMENTED) <= 107  # a new name needs a reason, and perhaps an old one can go
    assert len({name.split(".")[-1] for name in DOCUMENTED}) == len(DOCUMENTED)
    with pytest.raises(AttributeError, match="module 'tf_fusedrec' has no attribute 'nothing'"):
        _ = fr.nothing


@pytest.mark.parametrize(
    ("shown", "base", "names"),
    [
        (
            fr.FusedEmbedding,
            fr.keras.layers.Layer,
            "describe export_table layout loss_scaled_by optimizers prefetch remove statistics synchronize tables",
        ),
        (
            fr.schedules.PipelinedModel,
            fr.keras.Model,
            "drain embedding_inputs loss_weights micro_batch schedule steps_ahead",
        ),
    ],
)
def test_a_class_shows_its_users_no_machinery(shown, base, names):
    of_keras_3 = {"compute_output_spec"}  # which its layers override
    shown_names = [name for name in dir(shown) if name[0] != "_" and not hasattr(base, name)]
    assert [name for name in shown_names if name not in of_keras_3] == names.split()


def used(code):
    """Yields the dotted names of this package in a program, as users write them after tf_fusedrec."""
    tree, names = ast.parse(code), {"fr": ""}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "tf_fusedrec":
            room = node.module.removeprefix("tf_fusedrec").lstrip(".")
            names |= {alias.asname or alias.name: f"{room}.{alias.name}".lstrip(".") for alias in node.names}
    yield from names.values()
    for node in ast.walk(tree):
        path = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        if path[0] in names and all(part.isidentifier() for part in path):
            yield ".".join([names[path[0]], *path[1:]]).lstrip(".")


def codes(path):
    """Returns the programs of a page, of an example or of a notebook."""
    if path.suffix == ".md":
        return [program.code for program in programs(path)]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [text]
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [re.sub("^[%!].*", "", cell, flags=re.MULTILINE) for cell in cells]


@pytest.mark.parametrize(
    "path",
    [*PAGES, *(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")],
    ids=lambda path: path.name,
)
def test_programs_use_public_names(path):
    public = {*DOCUMENTED, "", "__version__"}
    for code in codes(path):
        for name in used(code):
            room, _, rest = name.partition(".")
            known = room in {"keras", "models", "tf"} or name in OTHERS or name.startswith("tfra.dynamic_embedding")
            assert known or {room, ".".join(name.split(".")[:2])} & public, name


@pytest.fixture(scope="module")
def made():
    """The names that the example of PipelinedModel makes, which all others use."""
    # AutoGraph finds the source of a class by the name of its module.
    names = {"__name__": __name__, "fr": fr, "keras": fr.keras, "np": np, "tf": fr.tf}
    run("schedules.PipelinedModel", names)
    return names


def docstring(name):
    room, _, leaf = name.rpartition(".")
    return getattr(importlib.import_module(f"tf_fusedrec.{room}".rstrip(".")), leaf).__doc__ or ""


def run(name, names):
    """Runs the example of a public name, which may have none."""
    example = doctest.DocTestParser().get_doctest(docstring(name), {}, name, None, 0)
    example.globs, said = names, []
    result = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    assert not result.failed, "".join(said)


@pytest.mark.slow
@pytest.mark.both
@pytest.mark.parametrize("page", BY_PAGE)
def test_examples_print_what_they_show(page, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("", ".apis", ".apis.prediction_log_pb2"):  # the package of TensorFlow Serving, which is no requirement
        stand_in = types.SimpleNamespace(PredictionLog=message_class())
        monkeypatch.setitem(sys.modules, f"tensorflow_serving{part}", stand_in)
    names = dict(made)
    for name in BY_PAGE[page]:
        if name != "schedules.PipelinedModel":
            run(name, names)


@pytest.mark.legacy  # imports tfra
def test_an_example_uses_each_public_name():
    examples = [example for name in DOCUMENTED for example in doctest.DocTestParser().get_examples(docstring(name))]
    found = {name for example in examples for name in used(example.source)}
    assert {*DOCUMENTED} - found == set()
