"""Every registered op has a shape function and documentation, and custom_ops/README.md lists it."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "custom_ops").rglob("*_op.cc"))
TABLE = (ROOT / "custom_ops/README.md").read_text(encoding="utf-8").partition("| folder | op |")[2].partition("\n\n")[0]


def registered(source: pathlib.Path) -> list[str]:
    return re.findall(r'REGISTER_OP\("(.+?)"\)', source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_registrations_have_shape_functions_and_docs(source):
    names, text = registered(source), source.read_text(encoding="utf-8")
    assert names and all(name.startswith("Fusedrec>") for name in names)
    assert text.count(".SetShapeFn(") == text.count(".Doc(") == len(names)


def test_the_table_of_ops_lists_every_op_and_no_other():
    cells = [line.split("|")[2] for line in TABLE.splitlines()[2:]]
    listed = [f"Fusedrec>{name}" for cell in cells for name in re.findall(r"`(?:Fusedrec>)?(\w+)`", cell)]
    assert sorted(listed) == sorted(name for source in SOURCES for name in registered(source))


def test_no_registration_is_elsewhere():
    others = [path for path in (ROOT / "custom_ops").rglob("*.cc") if path not in SOURCES]
    assert not [path for path in others if "REGISTER_OP(" in path.read_text(encoding="utf-8")]
