"""The manifest, which makes files a checkpoint. It is written last, under a temporary name, and renamed.

A checkpoint is a folder on a file system that all ranks see:

    manifest.json                                 copy of the last save's manifest; load reads it by default
    save-<number>-<random>/                       files of one save; its name ends in ".partial" until it is complete
      manifest.json                               list of the files that belong together, see below
      <table>.<section>-<rank>.shard              rows of one rank (shard_file.py)
      dense.index, dense.data-*                   tf.train.Checkpoint of model and optimizer, written by rank 0
      shard-<rank>.json                           report of one rank on its files, written once they are on the disk

A full save needs one folder. A delta needs two: the folder of the last full save, and its own folder with the changed
rows, the tombstones and all small data. Folders of earlier saves stay while they are kept (saves.py).

    {"format": 2, "save": "save-7-9e2b41cc", "ranks": 2, "extra": ..., "dense": {file name: [bytes, xxh3_64]},
     "tables": {"item": {"spec": {...}, "owner": "hash_range", "clock": 70, "iterations": 70,
                         "learning_rate": [0.1, 0.05], "parts": [
         {"save": "save-6-41cc9e2b", "ranks": 2, "sections": {"rows": true}},
         {"save": "save-7-9e2b41cc", "ranks": 2, "sections": {"rows": false, "tombstones": false}}]}},
     "checksum": xxh3_64 of all the rest}

A clock is one number that only grows: changes << 32 | training lookups. Records refer to both counts: `updated` to the
changes, `last` to the lookups.

The flag of a section is true if the part has the complete section, and false if it has changes to earlier parts. A
right checksum does not prove valid contents, so every field is checked.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tf_fusedrec.files import disk
from tf_fusedrec.files.disk import REMEDY

FORMAT = 2
NAME = "manifest.json"
SAVE_NAME = re.compile(r"save-[0-9]{1,18}-[0-9a-f]{8}")
TOMBSTONES = "tombstones"  # section of the removed ids; its records have no bytes
_SECTIONS = {"rows", "candidates", TOMBSTONES}
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_DATA = re.compile(r"dense\.data-([0-9]{5})-of-([0-9]{5})")
_NUMBER = re.compile(r"<[fui][248]|\|[ui]1")
_MOST_RANKS = 1 << 20
_SHIFT = 32  # of the changes in a clock


def pack_clock(changes: int, lookups: int) -> int:
    return changes << _SHIFT | lookups


def unpack_clock(clock: int) -> tuple[int, int]:
    """Changes and training lookups of a clock."""
    return clock >> _SHIFT, clock & ((1 << _SHIFT) - 1)


def latest_clock(clocks: Iterable[int]) -> int:
    """The clock with the larger of each count over all `clocks`."""
    changes, lookups = zip(*map(unpack_clock, clocks))
    return pack_clock(max(changes), max(lookups))


def _checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return disk.checksum(json.dumps(rest, sort_keys=True).encode())


def exists(directory: str | os.PathLike) -> bool:
    """Returns whether a save into `directory` was ever completed."""
    return (pathlib.Path(directory) / NAME).exists()


def read(directory: pathlib.Path, save: str | None = None) -> dict[str, Any]:
    """The manifest of the named save, or of the last one. Every field is checked.

    Raises:
      ValueError: `directory` has no such save; the format is unknown; the manifest is damaged or forged.
    """
    at = directory.resolve()
    if save is None and SAVE_NAME.fullmatch(at.name) and exists(at.parent):
        raise ValueError(
            f"folder must hold a checkpoint, but {directory} is one of its saves. Use {directory.parent}, and name the "
            f"save {at.name!r} if it is not the last."
        )
    path = directory / NAME if save is None else directory / save / NAME
    if not path.exists():
        raise ValueError(f"folder must hold a checkpoint, but {path} is missing. Was its save interrupted?")
    data = disk.read_whole(path)
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict):
            raise ValueError(f"want a dict, got {type(manifest).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. {REMEDY}") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')}, but this version reads {FORMAT}. Load it with the version "
            "that wrote it, or save into another folder."
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ValueError(f"{path} is damaged: its checksum differs. {REMEDY}")
    _check_manifest(_Check(path), directory, manifest)
    if save is not None and manifest["save"] != save:
        raise ValueError(f"{path} is foreign: it belongs to {manifest['save']!r}. {REMEDY}")
    return manifest


def write(folder: pathlib.Path, fields: dict[str, Any]) -> None:
    """Writes the manifest into a folder and replaces an existing one atomically."""
    # A reader computes the checksum over the parsed JSON, where tuples have become lists.
    manifest = json.loads(json.dumps({"format": FORMAT, **fields}))
    disk.write_durably(folder / NAME, json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1))


def shard_name(table: str, section: str, rank: int) -> str:
    """File name of a shard. TableConfig refuses names that no file can have."""
    return f"{table}.{section}-{rank}.shard"


def saves_of(manifest: dict[str, Any]) -> set[str]:
    """Names of the save folders that a checkpoint needs."""
    return {manifest["save"], *(part["save"] for table in manifest["tables"].values() for part in table["parts"])}


def check_shards(path: pathlib.Path, directory: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Raises ValueError, which names both files, if a save's folder has a shard that the manifest does not name."""
    named: dict[str, set[str]] = {save: set() for save in saves_of(manifest)}
    for table, described in manifest["tables"].items():
        for part in described["parts"]:
            ranks = range(part["ranks"])
            named[part["save"]] |= {shard_name(table, section, r) for section in part["sections"] for r in ranks}
    for save, shards in named.items():
        unnamed = sorted({file.name for file in (directory / save).glob("*.shard")} - shards)
        if unnamed:
            raise ValueError(
                f"{path} is forged or damaged: {directory / save} holds {unnamed[0]}, which it does not name. {REMEDY}"
            )


class _Check:
    """Checks of one file's fields. Each raises a ValueError that names the file and the field."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def need(self, valid: bool, field: str, value: Any, want: str) -> None:
        if not valid:
            shown = repr(value) if len(repr(value)) < 200 else repr(value)[:200] + "..."
            raise ValueError(f"{self._path} is forged or damaged: {field} is {shown}, want {want}. {REMEDY}")

    def fields(self, field: str, value: Any, *names: str) -> None:
        self.need(isinstance(value, dict) and set(value) == set(names), field, value, f"a dict of {sorted(names)}")

    def number(self, field: str, value: Any, least: int, most: int) -> None:
        valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        self.need(valid, field, value, f"an int in [{least}, {most}]")

    def text(self, field: str, value: Any, pattern: re.Pattern, want: str) -> None:
        self.need(isinstance(value, str) and pattern.fullmatch(value) is not None, field, value, want)


def _check_manifest(check: _Check, directory: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    check.fields("the manifest", manifest, "format", "save", "ranks", "extra", "dense", "tables", "checksum")
    check.text("save", manifest["save"], SAVE_NAME, "the name of a save")
    check.number("ranks", manifest["ranks"], 1, _MOST_RANKS)
    dense, tables = manifest["dense"], manifest["tables"]
    check.need(isinstance(dense, dict), "dense", dense, "a dict from file names to [bytes, checksum]")
    files = [_DATA.fullmatch(name) for name in dense if name != "dense.index"]
    numbers = sorted((int(file[1]), int(file[2])) for file in files if file is not None)
    complete = "dense.index" in dense and len(files) > 0 and numbers == [(n, len(files)) for n in range(len(files))]
    check.need(complete, "dense", sorted(dense), "dense.index and all of dense.data-*")
    for name, entry in dense.items():
        check.need(isinstance(entry, list) and len(entry) == 2, f"dense[{name!r}]", entry, "[bytes, checksum]")
        check.number(f"dense[{name!r}][0]", entry[0], 0, 1 << 62)
        check.text(f"dense[{name!r}][1]", entry[1], _CHECKSUM, "16 hexadecimal digits")
    check.need(isinstance(tables, dict), "tables", tables, "a dict from names to tables")
    for name, table in tables.items():
        check.need(name != "" and "/" not in name and "\0" not in name, "tables", name, "names without '/'")
        _check_table(check, f"tables[{name!r}]", table, manifest, directory)
    chains = {name: [part["save"] for part in table["parts"]] for name, table in tables.items()}
    first = next(iter(chains.values()), [])
    for name, chain in chains.items():
        check.need(chain == first, f"tables[{name!r}].parts", chain, f"the saves of the other tables, {first}")


def _check_table(check: _Check, at: str, table: Any, manifest: Mapping[str, Any], directory: pathlib.Path) -> None:
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
        pair = table["learning_rate"]
        check.need(isinstance(pair, list) and len(pair) == 2, f"{at}.learning_rate", pair, "[of the record, present]")
        for r, rate in enumerate(pair):
            valid = isinstance(rate, (int, float)) and not isinstance(rate, bool) and math.isfinite(rate)
            check.need(valid, f"{at}.learning_rate[{r}]", rate, "a finite number")
    parts = table["parts"]
    # A full save has one part; a delta has its full save's part and its own.
    check.need(isinstance(parts, list) and len(parts) in (1, 2), f"{at}.parts", parts, "a list of one or two parts")
    for p, part in enumerate(parts):
        check.fields(f"{at}.parts[{p}]", part, "save", "ranks", "sections")
        check.text(f"{at}.parts[{p}].save", part["save"], SAVE_NAME, "the name of a save")
        is_saved = (directory / part["save"]).is_dir()
        check.need(is_saved, f"{at}.parts[{p}].save", part["save"], f"a save that {directory} holds")
        check.number(f"{at}.parts[{p}].ranks", part["ranks"], 1, _MOST_RANKS)
        _check_sections(check, f"{at}.parts[{p}].sections", part["sections"], parts[0], changes=p > 0)
    last, present = (parts[-1]["save"], parts[-1]["ranks"]), (manifest["save"], manifest["ranks"])
    check.need(last == present, f"{at}.parts[{len(parts) - 1}]", last, f"save and ranks of the manifest, {present}")
    check.need(len(parts) == 1 or parts[0]["save"] != last[0], f"{at}.parts[0].save", last[0], "the full save before")


def _check_sections(check: _Check, at: str, sections: Any, first: Mapping[str, Any], changes: bool) -> None:
    valid = isinstance(sections, dict) and set(sections) <= _SECTIONS and "rows" in sections
    check.need(valid, at, sections, f"a dict of 'rows' and others of {sorted(_SECTIONS)}")
    flags = all(isinstance(flag, bool) for flag in sections.values())
    check.need(flags, at, sections, "true or false for each section")
    if changes:
        # A delta has changed rows, removed ids, and the small sections completely.
        want = {section: section not in ("rows", TOMBSTONES) for section in (*first["sections"], TOMBSTONES)}
        check.need(sections == want, at, sections, f"{want}")
    else:
        check.need(all(sections.values()) and TOMBSTONES not in sections, at, sections, "whole sections")


def check_header(path: pathlib.Path, header: Any) -> None:
    """Raises ValueError, which names file and field, unless a save could have written the header of a shard."""
    check = _Check(path)
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
        valid = isinstance(entry, list) and len(entry) in (2, 3) and all(isinstance(text, str) for text in entry[:2])
        check.need(valid, "record", entry, "[name, dtype] or [name, dtype, shape]")
        check.text("record", entry[1], _NUMBER, "the dtype of a number")
        shape = entry[2] if len(entry) == 3 else []
        check.need(isinstance(shape, list) and len(shape) <= 1, "record", entry, "a shape of one dimension")
        for size in shape:
            check.number("record", size, 1, 1 << 28)
    names = [entry[0] for entry in record]
    check.need(len(set(names)) == len(names) and "" not in names, "record", names, "distinct names")
