"""Checks of every field of a manifest and of a shard's header. A right checksum does not prove valid contents."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from tf_fusedrec.checkpoint.disk import REMEDY

SAVE_NAME = re.compile(r"save-[0-9]{1,18}-[0-9a-f]{8}")
TOMBSTONES = "tombstones"  # section of the removed ids; its records have no bytes
_SECTIONS = {"rows", "candidates", TOMBSTONES}
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_DATA = re.compile(r"dense\.data-([0-9]{5})-of-([0-9]{5})")
_NUMBER = re.compile(r"<[fui][248]|\|[ui]1")
_MOST_RANKS = 1 << 20


class _Checked:
    """Checks of one file's fields. Each raises a ValueError that names the file and the field."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def need(self, right: bool, field: str, got: Any, want: str) -> None:
        if not right:
            shown = repr(got) if len(repr(got)) < 200 else repr(got)[:200] + "..."
            raise ValueError(f"{self._path} is forged or damaged: {field} is {shown}, want {want}. {REMEDY}")

    def fields(self, field: str, got: Any, *names: str) -> None:
        self.need(isinstance(got, dict) and set(got) == set(names), field, got, f"a dict of {sorted(names)}")

    def number(self, field: str, got: Any, least: int, most: int) -> None:
        right = isinstance(got, int) and not isinstance(got, bool) and least <= got <= most
        self.need(right, field, got, f"an int in [{least}, {most}]")

    def text(self, field: str, got: Any, pattern: re.Pattern, want: str) -> None:
        self.need(isinstance(got, str) and pattern.fullmatch(got) is not None, field, got, want)


def check_manifest(path: pathlib.Path, directory: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError, which names file and field, unless a save could have written the manifest.

    Args:
      path: Path of the manifest.
      directory: Folder of the checkpoint, which holds the folders of the saves.
      manifest: Parsed manifest.
    """
    check = _Checked(path)
    check.fields("the manifest", manifest, "format", "save", "ranks", "extra", "dense", "tables", "checksum")
    check.text("save", manifest["save"], SAVE_NAME, "the name of a save")
    check.number("ranks", manifest["ranks"], 1, _MOST_RANKS)
    _check_dense(check, manifest["dense"])
    tables = manifest["tables"]
    check.need(isinstance(tables, dict), "tables", tables, "a dict from names to tables")
    for name, table in tables.items():
        check.need(name != "" and "/" not in name and "\0" not in name, "tables", name, "names without '/'")
        _check_table(check, f"tables[{name!r}]", table, manifest, directory)
    chains = {name: [part["save"] for part in table["parts"]] for name, table in tables.items()}
    first = next(iter(chains.values()), [])
    for name, chain in chains.items():
        check.need(chain == first, f"tables[{name!r}].parts", chain, f"the saves of the other tables, {first}")


def _check_dense(check: _Checked, dense: Any) -> None:
    check.need(isinstance(dense, dict), "dense", dense, "a dict from file names to [bytes, checksum]")
    files = [_DATA.fullmatch(name) for name in dense if name != "dense.index"]
    count = len(files)
    numbers = sorted((int(file[1]), int(file[2])) for file in files if file is not None)
    complete = "dense.index" in dense and count > 0 and numbers == [(n, count) for n in range(count)]
    check.need(complete, "dense", sorted(dense), "dense.index and all of dense.data-*")
    for name, entry in dense.items():
        check.need(isinstance(entry, list) and len(entry) == 2, f"dense[{name!r}]", entry, "[bytes, checksum]")
        check.number(f"dense[{name!r}][0]", entry[0], 0, 1 << 62)
        check.text(f"dense[{name!r}][1]", entry[1], _CHECKSUM, "16 hexadecimal digits")


def _check_table(check: _Checked, at: str, table: Any, manifest: Mapping[str, Any], directory: pathlib.Path) -> None:
    # Version 0.1.0 wrote no learning rates.
    rates = ("learning_rate",) if isinstance(table, dict) and "learning_rate" in table else ()
    check.fields(at, table, "spec", "owner", "clock", "iterations", "parts", *rates)
    spec = table["spec"]
    check.fields(f"{at}.spec", spec, "dim", "storage", "optimizer", "slots")
    check.number(f"{at}.spec.dim", spec["dim"], 1, 1 << 24)
    check.need(isinstance(spec["storage"], str), f"{at}.spec.storage", spec["storage"], "the name of a dtype")
    check.need(isinstance(spec["optimizer"], dict), f"{at}.spec.optimizer", spec["optimizer"], "a dict")
    named = isinstance(spec["slots"], list) and all(isinstance(slot, str) for slot in spec["slots"])
    check.need(named, f"{at}.spec.slots", spec["slots"], "a list of names")
    check.need(table["owner"] in ("hash_range", "tfra"), f"{at}.owner", table["owner"], "'hash_range' or 'tfra'")
    check.number(f"{at}.clock", table["clock"], 0, (1 << 64) - 1)
    if table["iterations"] is not None:
        check.number(f"{at}.iterations", table["iterations"], 0, (1 << 63) - 1)
    if table.get("learning_rate") is not None:
        given = table["learning_rate"]
        check.need(
            isinstance(given, list) and len(given) == 2, f"{at}.learning_rate", given, "[of the record, present]"
        )
        for r, rate in enumerate(given):
            right = isinstance(rate, (int, float)) and not isinstance(rate, bool) and math.isfinite(rate)
            check.need(right, f"{at}.learning_rate[{r}]", rate, "a finite number")
    parts = table["parts"]
    # A full save has one part; a delta has its full save's part and its own.
    check.need(isinstance(parts, list) and len(parts) in (1, 2), f"{at}.parts", parts, "a list of one or two parts")
    for p, part in enumerate(parts):
        check.fields(f"{at}.parts[{p}]", part, "save", "ranks", "sections")
        check.text(f"{at}.parts[{p}].save", part["save"], SAVE_NAME, "the name of a save")
        check.need(
            (directory / part["save"]).is_dir(), f"{at}.parts[{p}].save", part["save"], f"a save that {directory} holds"
        )
        check.number(f"{at}.parts[{p}].ranks", part["ranks"], 1, _MOST_RANKS)
        _check_sections(check, f"{at}.parts[{p}].sections", part["sections"], parts[0], changes=p > 0)
    last, own = (parts[-1]["save"], parts[-1]["ranks"]), (manifest["save"], manifest["ranks"])
    check.need(last == own, f"{at}.parts[{len(parts) - 1}]", last, f"save and ranks of the manifest, {own}")
    check.need(len(parts) == 1 or parts[0]["save"] != last[0], f"{at}.parts[0].save", last[0], "the full save before")


def _check_sections(check: _Checked, at: str, sections: Any, whole: Mapping[str, Any], changes: bool) -> None:
    right = isinstance(sections, dict) and set(sections) <= _SECTIONS and "rows" in sections
    check.need(right, at, sections, f"a dict of 'rows' and others of {sorted(_SECTIONS)}")
    flags = all(isinstance(flag, bool) for flag in sections.values())
    check.need(flags, at, sections, "true or false for each section")
    if changes:
        # A delta has changed rows, removed ids, and the small sections as a whole.
        want = {section: section not in ("rows", TOMBSTONES) for section in (*whole["sections"], TOMBSTONES)}
        check.need(sections == want, at, sections, f"{want}")
    else:
        check.need(all(sections.values()) and TOMBSTONES not in sections, at, sections, "whole sections")


def check_no_more(path: pathlib.Path, folder: pathlib.Path, named: Collection[str]) -> None:
    """Raises ValueError, which names both files, if a save's folder holds a shard that the manifest does not name."""
    more = sorted({file.name for file in folder.glob("*.shard")} - set(named))
    if more:
        raise ValueError(f"{path} is forged or damaged: {folder} holds {more[0]}, which it does not name. {REMEDY}")


def check_header(path: pathlib.Path, header: Any) -> None:
    """Raises ValueError, which names file and field, unless a save could have written the header of a shard."""
    check = _Checked(path)
    check.fields("the header", header, "save", "table", "section", "rank", "ranks", "rows", "block", "record")
    for name in ("save", "table", "section"):
        check.need(isinstance(header[name], str), name, header[name], "a name")
    check.number("ranks", header["ranks"], 1, _MOST_RANKS)
    check.number("rank", header["rank"], 0, header["ranks"] - 1)
    check.number("rows", header["rows"], 0, 1 << 48)
    check.number("block", header["block"], 1, 1 << 32)
    record = header["record"]
    check.need(isinstance(record, list), "record", record, "a list of fields")
    for entry in record:
        right = isinstance(entry, list) and len(entry) in (2, 3) and all(isinstance(text, str) for text in entry[:2])
        check.need(right, "record", entry, "[name, dtype] or [name, dtype, shape]")
        check.text("record", entry[1], _NUMBER, "the dtype of a number")
        shape = entry[2] if len(entry) == 3 else []
        check.need(isinstance(shape, list) and len(shape) <= 1, "record", entry, "a shape of one dimension")
        for size in shape:
            check.number("record", size, 1, 1 << 28)
    names = [entry[0] for entry in record]
    check.need(len(set(names)) == len(names) and "" not in names, "record", names, "distinct names")
