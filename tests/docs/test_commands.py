"""Every program of the pages prints the output below it. Modules, flags, targets and files of commands exist."""

import contextlib
import importlib
import io
import re
import shlex
import types

import numpy as np
import pytest

from tests.docs.commands import PAGES, ROOT, commands, modules_and_flags, programs
from tf_fusedrec.cli.main import parse
from tf_fusedrec.models.experiment import load
from tf_fusedrec.models.export import _RankingServer
from tf_fusedrec.models.serve import tensors
from tf_fusedrec.models.serve.batching import sizes_of
from tf_fusedrec.models.serve.loaded import Signature, Spec

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SHOWN = sorted({command for page in PAGES for command in commands(page)})


def test_versions_for_gpus_are_pinned():
    """Nobody runs the commands that install a cluster with GPUs, but CPU tests run the same versions."""
    pins = "".join((ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("runtime", "horovod"))
    found = [
        re.findall(r"(tensorflow|horovod)(?:\[and-cuda\])?==([\d.]+)", line) for line in commands(ROOT / "docs/gpu.md")
    ]
    shown = [pair for pairs in found for pair in pairs]
    assert {name for name, _ in shown} == {"tensorflow", "horovod"}
    assert [pair for pair in shown if "\n{}=={}\n".format(*pair) not in pins] == []


def page_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=page_name)
def test_programs_print_what_is_written_below_them(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for program in programs(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program.code, page.name, "exec"), names)
        assert program.output in (None, printed.getvalue())


def test_the_request_has_the_inputs_of_the_main_job():
    bodies = [shlex.split(command)[2] for command in commands(ROOT / "docs/serving.md") if ":predict" in command]
    (body,) = (body for body in bodies if "history_item" in body)
    config = load(ROOT / "configs/grm_tiny.yaml", []).model
    signatures = _RankingServer(types.SimpleNamespace(config=config)).signatures()
    request = tensors.parse(body.encode(), {
        "serving_default": Signature({
            name: Spec(np.dtype(spec.dtype.as_numpy_dtype), tuple(spec.shape))
            for name, spec in signatures["serving_default"].inputs.items()
        }, {})
    })  # fmt: skip
    sizes = sizes_of(request.inputs)
    for role in ("history", "exposed"):
        assert sizes[f"{role}_row_splits end"] == sizes[f"{role}_item"] == sizes[f"{role}_time"]
        assert sizes[f"{role}_row_splits"] == sizes["user_budget"]


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


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("fusedrec ")])
def test_the_program_takes_the_arguments_of_a_command(command):
    words = shlex.split(command)[1:]
    parse(importlib.import_module(f"tf_fusedrec.cli.{words[0]}"), words)  # else it exits with 2


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page):
    text = page.read_text(encoding="utf-8")
    shown = " ".join([*commands(page), *re.findall(r"`(make [^`\n]*)`", text)])
    assert set(re.findall(r"\bmake ([a-z-]+)", shown)) <= TARGETS


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_of_commands_exist(page):
    """Files that a reader makes begin with "runs/", "path/to/" and the like, which are no folders of the repository."""
    words = [word.strip("'").split("::")[0] for command in commands(page) for word in command.split()]
    named = [word for word in words if word.startswith(("configs/", "examples/", "requirements/", "tests/"))]
    assert [name for name in named if not (ROOT / name).exists()] == []
