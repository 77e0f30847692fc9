"""Every program of the documentation prints the output below it. Modules, flags and targets of its commands exist."""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import types

import numpy as np
import pytest

from models.experiment import load
from models.export import _RankingServer
from models.serve import tensors
from models.serve.batching import sizes_of
from models.serve.loaded import Signature, Spec
from tests.docs.commands import PAGES, ROOT, commands, diffs, modules_and_flags, programs

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
# The request of docs/served_model.md.
REQUEST = {
    "user_budget": [2], "user_device": [1], "history_item": [17, 42, 8], "history_action": [1, 0, 1],
    "history_time": [1700000000, 1700000060, 1700000120], "history_row_splits": [0, 3], "exposed_item": [17, 23],
    "exposed_time": [1700000180, 1700000180], "exposed_row_splits": [0, 2],
}  # fmt: skip

# These install a cluster with GPUs. Without such a cluster, only the pinned versions are tested.
ONLY_ON_GPUS = (
    "pip install 'tensorflow[and-cuda]==2.16.2'",
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "
    "HOROVOD_WITHOUT_MPI=1 HOROVOD_GPU_OPERATIONS=NCCL pip install --no-build-isolation horovod==0.28.1",
)
RUN_HERE = ("python -m tf_fusedrec.data.convert synthetic-", "python -m benchmarks.plots")
SHOWN = sorted({command for page in PAGES for command in commands(page)})


@pytest.mark.parametrize("page", [page for page in PAGES if diffs(page)], ids=lambda page: page.stem)
def test_the_diffs_of_a_page_import_what_they_call(page):
    for added, after in diffs(page):
        names = {}
        for statement in ast.parse(after).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                exec(ast.unparse(statement), names)
        bound = {
            node.id
            for node in ast.walk(ast.parse(after))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(ast.parse(added)):
            if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).split(".")[0] not in bound:
                eval(ast.unparse(node), names)


def test_versions_for_gpus_are_pinned():
    pins = "".join((ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("runtime", "horovod"))
    for command in ONLY_ON_GPUS:
        name, version = re.search(r"([a-z]+)(?:\[and-cuda\])?==([\d.]+)", command).groups()
        assert f"\n{name}=={version}\n" in pins, command


def page_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if programs(page)], ids=page_name)
def test_programs_print_what_is_written_below_them(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for program in programs(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.code, page.name, "exec"), names)
        assert printed.getvalue() == program.output


def test_the_request_has_the_inputs_of_the_main_job():
    config = load(ROOT / "configs/grm_tiny.yaml", []).model
    signatures = _RankingServer(types.SimpleNamespace(config=config)).signatures()
    request = tensors.parse(json.dumps({"inputs": REQUEST}).encode(), {
        "serving_default": Signature({
            name: Spec(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape))
            for name, spec in signatures["serving_default"].inputs.items()
        }, {})
    })  # fmt: skip
    sizes = sizes_of(request.inputs)
    for role in ("history", "exposed"):
        assert sizes[f"{role}_row_splits end"] == sizes[f"{role}_item"] == sizes[f"{role}_time"]
        assert sizes[f"{role}_row_splits"] == sizes["user_budget"]


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith(RUN_HERE)])
def test_cheap_commands_end_well(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[2:]
    monkeypatch.setattr(sys, "argv", words)
    for imported in (words[0], f"{words[0]}.__main__"):  # A command begins without its module.
        monkeypatch.delitem(sys.modules, imported, raising=False)
    runpy.run_module(words[0], run_name="__main__")
    assert any(path.is_file() for path in tmp_path.rglob("*")), "it wrote nothing"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_modules_and_their_flags_exist(page):
    for module, flags in modules_and_flags(page):
        if module in ("pytest", "mkdocs") or module == "benchmarks.":  # modules of others, and "benchmarks.<op>"
            continue
        path = ROOT / module.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
        text = source.read_text(encoding="utf-8")
        known = {f"--{name}" for name in re.findall(r'(?:add_argument\(\s*"--|DEFINE_\w+\(\s*")([\w-]+)"', text)}
        if "harness.parser(" in text:
            known |= {"--quick", "--json"}
        assert set(flags) <= known, f"{module} has {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    shown = " ".join([*commands(page), *re.findall(r"`(make [^`\n]*)`", text)])
    assert set(re.findall(r"\bmake ([a-z-]+)", shown)) <= TARGETS


def test_targets_of_the_readmes_links_exist():
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", PAGES[0].read_text(encoding="utf-8"))
    assert links and all((ROOT / link).exists() for link in links)
