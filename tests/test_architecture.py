"""Imports follow the data; TensorFlow, Horovod and their like have one importer each; algorithms know no TensorFlow."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tf_fusedrec"

# A room may import rooms of a lower level only.
LEVEL = {
    "_environment": -1,
    "_tf_compat": 0,
    "files": 0,
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
    "doctor": 10,
    "tfra": 10,
    "collectives": 11,
    "models": 12,
    "cli": 13,
}
# Modules that each of these must never import, at any level.
STRANGERS = {
    "exchange": {"tables", "embedding"},
    "tables": {"exchange"},
    "layers": {"exchange", "embedding"},
    "data": {"embedding", "tables"},
}
DOORS = {
    "tensorflow": "_tf_compat",
    "tf_keras": "_tf_compat",
    "keras": "_tf_compat",
    "horovod": "horovod",
    "tensorflow_recommenders_addons": "tfra_library",
}
# Servers get a copy of it, and have TensorFlow and NumPy only.
TRAVELS = PACKAGE / "saved_model" / "applying.py"
ALGORITHMS = sorted(
    path
    for path in (ROOT / "custom_ops").rglob("*.*")
    if path.suffix in (".cc", ".h") and not path.stem.endswith(("_op", "_kernel"))
    and not {"common", "kernels"} & set(path.relative_to(ROOT).parts)
)  # fmt: skip


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports():
    """Yields (file, line, dotted module) of every import. `from tf_fusedrec import x` counts as tf_fusedrec.x."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names = [f".{alias.name}" for alias in node.names] if node.module == "tf_fusedrec" else [""]
                yield from ((path, node.lineno, f"{node.module}{name}") for name in names)


def test_imports_follow_the_data():
    bad = []
    for path, line, module in imports():
        here, (package, *rest) = room_of(path), module.split(".")
        if package != "tf_fusedrec" or here in ("__init__", "_public") or rest[0] == here:
            continue
        there = rest[0]
        if not {here, there} <= set(LEVEL) or LEVEL[there] >= LEVEL[here] or there in STRANGERS.get(here, ()):
            bad.append(f"{path.relative_to(ROOT)}:{line} imports {there}")
    assert not bad, "imports against the data flow, or of a room without a level:\n" + "\n".join(bad)


def test_tensorflow_keras_horovod_and_tfra_have_one_door():
    bad = []
    for path, line, module in imports():
        # Programs on ranks use Horovod, and the launcher its rendezvous.
        door = "launch" if module.startswith("horovod.runner") else DOORS.get(module.split(".")[0])
        if door not in (None, path.stem, room_of(path)) and (path, module) != (TRAVELS, "tensorflow"):
            bad.append(f"{path.relative_to(ROOT)}:{line} imports {module}; only {door} may")
    assert not bad, "\n".join(bad)


def test_algorithms_know_no_tensorflow():
    assert len(ALGORITHMS) > 20
    assert [path for path in ALGORITHMS if '#include "tensorflow/' in path.read_text(encoding="utf-8")] == []
