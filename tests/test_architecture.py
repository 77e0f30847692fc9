"""Imports follow the data, TensorFlow and Horovod have one importer each, and every op has all its files."""

import ast
import fnmatch
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tf_fusedrec"

# A room may import rooms of a lower level only.
LEVEL = {
    "_tf_compat": 0,
    "initializers": 1,
    "optimizers": 1,
    "ops": 1,
    "config": 2,
    "exchange": 3,
    "tables": 4,
    "metrics": 4,
    "layers": 4,
    "data": 4,
    "losses": 4,
    "embedding": 7,
    "checkpoint": 8,
    "schedules": 8,
    "callbacks": 9,
    "saved_model": 9,
    "tfra": 9,
    "doctor": 10,
}
# Servers get a copy of it, and have TensorFlow and NumPy only.
TRAVELS = PACKAGE / "saved_model" / "applying.py"
# Modules that each of these must never import, at any level.
STRANGERS = {
    "exchange": {"tables", "embedding"},
    "tables": {"exchange"},
    "layers": {"exchange", "embedding"},
    "data": {"embedding", "tables"},
}
DOORS = {
    "tensorflow": "_tf_compat.py",
    "tf_keras": "_tf_compat.py",
    "keras": "_tf_compat.py",
    "horovod": "collectives.py",
    "tensorflow_recommenders_addons": "tfra_library.py",
}


def imports_of(path: pathlib.Path):
    """Returns (line, dotted module) of every import in a file. `from tf_fusedrec import x` counts as tf_fusedrec.x."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            if node.module == "tf_fusedrec":
                yield from ((node.lineno, f"tf_fusedrec.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) != "__init__"]


def test_folders_can_be_surveyed():
    """No folder has more than 26 files, and the package at most 20 entries: a reader finds a noun at first sight."""
    sources = ("benchmarks", "configs", "custom_ops", "docs", "examples", "models", "tests", "tf_fusedrec", "tools")
    folders = [folder for room in sources for folder in (ROOT / room, *(ROOT / room).rglob("*")) if folder.is_dir()]
    files = {
        str(folder.relative_to(ROOT)): sum(path.is_file() for path in folder.iterdir())
        for folder in folders
        if folder.name != "__pycache__"
    }
    assert {folder: number for folder, number in files.items() if number > 26} == {}
    assert sum(path.is_file() or any(path.rglob("*.py")) for path in PACKAGE.iterdir()) <= 20


def test_every_room_has_a_level():
    assert {room_of(path) for path in modules()} <= set(LEVEL)


def test_imports_follow_the_data():
    bad = []
    for path in modules():
        here = room_of(path)
        for line, module in imports_of(path):
            parts = module.split(".")
            if parts[0] != "tf_fusedrec" or parts[1] == here:
                continue
            there = parts[1]
            if there not in LEVEL or LEVEL[there] >= LEVEL[here] or there in STRANGERS.get(here, ()):
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {there}")
    assert not bad, "imports against the data flow:\n" + "\n".join(bad)


def test_public_names_are_there():
    import tf_fusedrec as fr

    assert {"callbacks", "data", "metrics", "rank", "size"} <= set(fr.__all__)
    assert all(hasattr(fr, name) for name in fr.__all__)
    with pytest.raises(AttributeError, match="module 'tf_fusedrec' has no attribute 'nothing'"):
        _ = fr.nothing


def test_an_import_reaches_every_room():
    rooms = [name for name in LEVEL if not name.startswith("_")]
    used = "fr.losses.negatives, fr.losses.global_mean, fr.tfra.fuse, fr.metrics.streaming.AUC, fr.data.TokenBatches"
    code = f"import tf_fusedrec as fr; [getattr(fr, room) for room in {rooms}]; {used}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_tensorflow_keras_and_horovod_have_one_door():
    bad = []
    for path in modules():
        for line, module in imports_of(path):
            door = DOORS.get(module.split(".")[0])
            if path == TRAVELS and module == "tensorflow":
                continue
            if door is not None and path.name != door:
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {module}; only {door} may")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_tfra_is_an_extra():
    """The other modules import without it (tests/environment/test_extras.py); construction.py imports it on demand."""
    allowed = {"tables/tfra.py", "embedding/construction.py"}
    needing = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for _, module in imports_of(path)
        if room_of(path) != "tfra" and module.startswith(("tf_fusedrec.tables.tfra", "tf_fusedrec.tfra"))
    }
    assert needing == allowed


def test_files_for_servers_need_tensorflow_and_numpy_only():
    found = {module.split(".")[0] for _, module in imports_of(TRAVELS)}
    assert found - sys.stdlib_module_names - {"__future__"} == {"numpy", "tensorflow"}


def test_the_layers_of_a_model_are_found_in_one_place():
    """Two searches would sooner or later find different layers. Searches for TFRA's and attention layers are others."""
    places = {"embedding/search.py", "tfra/fusing.py", "saved_model/serving.py"}
    found = {str(path.relative_to(PACKAGE)) for path in modules() if ".submodules" in path.read_text(encoding="utf-8")}
    assert found == places


# Calls and decorators whose only effect is the value or the function that they return.
MAKE_VALUES = {
    "collections.Counter", "contextvars.ContextVar", "dict.fromkeys", "len", "logging.getLogger", "map", "np.dtype",
    "pa.float32", "pa.int64", "pa.string", "pathlib.Path", "pathlib.Path(__file__).with_name", "range", "re.compile",
    "str", "tf.get_logger", "tuple", "_asking_tables_first", "_installed", "check_versions",
    "contextlib.contextmanager", "dataclasses.dataclass", "finds_layers", "functools.cache",
    "tf.autograph.experimental.do_not_convert", "tf.custom_gradient", "tf.function",
}  # fmt: skip


def executed(body):
    """Yields the statements that an import runs. A class's decorators run, a function's body does not."""
    for node in body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        yield node
        if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            for part in ("body", "orelse", "finalbody"):
                yield from executed(getattr(node, part, []))


def effects_of(path: pathlib.Path):
    """Returns the names of a module's statements that change anything but the module's own names."""
    for node in executed(ast.parse(path.read_text(encoding="utf-8")).body):
        calls = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            calls = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (ast.unparse(part) for part in parts if not isinstance(part, ast.Name))
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            calls = [call.func for call in ast.walk(node.value) if isinstance(call, ast.Call)]
        yield from (name for name in map(ast.unparse, calls) if not makes_a_value(name))


def makes_a_value(function: str) -> bool:
    """Returns whether a call has no effect but its value. A class, known by its capital letter, makes an object."""
    is_class = function.split(".")[-1].lstrip("_")[:1].isupper() and function != "tf.RegisterGradient"
    return function in MAKE_VALUES or is_class


def test_side_effects_of_an_import_are_listed():
    import tf_fusedrec

    listed = re.findall(r"^  (\S+\.py) +(\S+)  *\S", tf_fusedrec.__doc__, re.MULTILINE)
    found = [
        (str(path.relative_to(PACKAGE)), name) for path in sorted(PACKAGE.rglob("*.py")) for name in effects_of(path)
    ]

    def matches(effect, row):
        return all(fnmatch.fnmatchcase(text, pattern) for text, pattern in zip(effect, row))

    unlisted = [effect for effect in found if not any(matches(effect, row) for row in listed)]
    gone = [row for row in listed if not any(matches(effect, row) for effect in found)]
    assert not unlisted and not gone, f"list in tf_fusedrec/__init__.py: add {unlisted}, remove {gone}"


def test_models_use_only_what_a_user_can_import():
    bad = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "models").glob("*.py"))
        for line, module in imports_of(path)
        if module != "__future__" and any(part.startswith("_") for part in module.split("."))
    ]
    assert not bad, "\n".join(bad)


def test_text_is_utf8_whatever_the_locale():
    """Under LC_ALL=C, Python would refuse the non-ASCII letters of our files."""
    bad = []
    for folder in ("tf_fusedrec", "models", "benchmarks", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                keywords = {word.arg for word in node.keywords} if isinstance(node, ast.Call) else {"encoding"}
                if "encoding" in keywords:
                    continue
                name = ast.unparse(node.func).split(".")[-1]
                if name in ("read_text", "write_text") or ast.unparse(node.func) == "open" or "text" in keywords:
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:80]}")
    assert not bad, 'name encoding="utf-8":\n' + "\n".join(bad)


def test_steps_have_one_numbering():
    """The code uses the numbers of the list in docs/concepts.md, "From an id to a row"."""
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8").split("## From an id to a row")[1].split("```")[0]
    items = re.findall(r"^\d\. (.*(?:\n   .*)*)", page, re.MULTILINE)
    named = {}
    for path in modules():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[Ss]tages? \d", text), f"{path}: name the step of docs/concepts.md"
        for number, of in re.findall(r"[Ss]teps? (\d)(?: and \d)? of (\d)", text):
            assert int(of) == len(items)
            named[path.stem] = items[int(number) - 1]
    for stem, word in {"fuse_ids": "`fuse_ids`", "recovery": "`recover`", "hash_table": "owner's table"}.items():
        assert word in named[stem]
    assert all(f"`{stem}`" in named[stem] for stem in ("segment_unique", "rank_partition"))
    assert all("owner's table" in named[stem] for stem in ("initial_rows", "native", "tfra", "external"))


OPS = sorted(path.name for path in (ROOT / "custom_ops").iterdir() if path.is_dir() and path.name != "common")


# Benchmarks compare the table with other tables and the attention with padded attention. They count the bytes that
# clustering saves.
BENCHMARK_OF = {"hash_table": "table", "jagged_attention": "attention", "cluster_samples": "clustering"}


# This op passes a tensor through, so it has no oracle and no benchmark.
COMPUTES_NOTHING = {"collective_marks"}


@pytest.mark.parametrize("stem", OPS)
def test_every_op_fills_its_rooms(stem):
    """Each op has algorithm, registration, kernel, Python function, oracle, test, benchmark, and a row in the table."""
    folder = ROOT / "tests/ops" / stem  # where one file of tests is too few
    tests = folder if folder.exists() else folder.parent
    rooms = [f"tf_fusedrec/ops/{stem}.py", f"{tests.relative_to(ROOT)}/test_{stem}.py"]
    if stem not in COMPUTES_NOTHING:
        rooms += [f"tests/oracles/{stem}.py", f"benchmarks/{BENCHMARK_OF.get(stem, stem)}/__main__.py"]
    missing = [room for room in rooms if not (ROOT / room).exists()]
    files = {path.name for path in (ROOT / "custom_ops" / stem).rglob("*")}
    missing += sorted({f"{stem}.h", f"{stem}.cc", f"{stem}_op.cc", f"{stem}_kernel.cc"} - files)
    assert not missing
    assert f"| `{stem}` |" in (ROOT / "custom_ops/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("stem", OPS)
def test_algorithms_know_no_tensorflow(stem):
    for path in sorted(path for path in (ROOT / "custom_ops" / stem).rglob("*") if path.is_file()):
        if not path.name.endswith(("_op.cc", "_kernel.cc")) and path.parent.name != "kernels":
            assert '#include "tensorflow/' not in path.read_text(encoding="utf-8"), path.name
