"""Looks into a checkpoint, a run, an export, a delta of an export or a data set.

    fusedrec inspect runs/clicks                                tables of the last save
    fusedrec inspect runs/clicks --table item                   lookups, hottest and coldest rows
    fusedrec inspect runs/clicks --table item --id A7           one row, and the rows nearest to it
    fusedrec inspect runs/clicks --against runs/clicks_monday   what changed since another checkpoint
    fusedrec inspect runs/clicks/saved_model

Every file of the save is verified, and a damaged one is named. A checkpoint is read in parts of 64 MiB, without
TensorFlow. An export or a delta is read whole, by TensorFlow.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.cli.main import say
from tf_fusedrec.files import manifest, saves
from tf_fusedrec.files.inspection import Row, SavedTable, TableSummary, open_tables
from tf_fusedrec.models.run_folder import checkpoint_of

EXPORT = pathlib.Path("assets.extra/tables.json")
FORMS = (
    "a run, a checkpoint (manifest.json), an export (assets.extra/tables.json), a delta (delta.json) or a data set "
    "(dataset.json)"
)
BAR = 30  # characters of the longest bar of a histogram

Answer = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("inspect", description=__doc__)
    parser.add_argument("path", type=pathlib.Path, help="run, checkpoint, export or data set")
    parser.add_argument("--save", help='kept save of the checkpoint, by name, number or "best" (default: the last one)')
    parser.add_argument("--table", help="one table in detail")
    parser.add_argument("--id", help="id or text of one row of --table")
    parser.add_argument("--data", type=pathlib.Path, help="data set that knows the text of ids (default: the run's)")
    parser.add_argument("--rows", type=int, default=10, help="rows in each list (default: %(default)s)")
    parser.add_argument("--against", type=pathlib.Path, help="earlier checkpoint or run to compare with")


def run(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if not path.is_dir():
        raise ValueError(f"no such folder: {path}. Name {FORMS}.")
    if arguments.id is not None and arguments.table is None:
        raise ValueError(f"--id is {arguments.id!r} without --table. Name the table, too.")
    if arguments.rows < 1:
        raise ValueError(f"--rows is {arguments.rows}, want at least 1.")
    checkpoint = checkpoint_of(path)
    if checkpoint is not None:
        answer, lines = _checkpoint(checkpoint, arguments)
    else:
        reader = next((reader for file, reader in READERS.items() if (path / file).is_file()), None)
        if reader is None:
            raise ValueError(f"{path} is none of what this command reads: {FORMS}.")
        for option in ("save", "table", "id", "against", "data"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option} is for checkpoints, and {path} is none. Name a run or a checkpoint.")
        say(arguments, f"reading {path}")
        answer, lines = reader(path)
    print(json.dumps(answer, indent=1) if arguments.json else "\n".join(lines))
    return 0


def _checkpoint(folder: pathlib.Path, arguments: argparse.Namespace) -> tuple[Answer, list[str]]:
    save = int(arguments.save) if (arguments.save or "").isdecimal() else arguments.save
    described = saves.read_manifest(folder, save)
    tables = _tables(folder, described, arguments.table)
    texts = Texts(arguments.data or _data_of(described))
    if arguments.against is not None:
        return _changes(tables, texts, arguments)
    if arguments.id is not None:
        return _one_row(tables[arguments.table], texts, arguments)
    summaries = {name: table.summary(arguments.rows) for name, table in tables.items()}
    named = {
        name: texts.of(name, [row.id for row in (*summary.hottest, *summary.coldest)])
        for name, summary in summaries.items()
    }
    header, lines = _about(folder, described)
    lines += _overview(summaries)
    if arguments.table is not None:
        lines += _details(arguments.table, summaries[arguments.table], named[arguments.table])
    of_tables = {name: summary_json(summary, named[name]) for name, summary in summaries.items()}
    return {**header, "tables": of_tables}, lines


class Texts:
    """The text of ids, which the data set of a run keeps. Without a data set, an id is its own text."""

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder

    def of(self, table: str, ids: Sequence[int]) -> dict[int, str]:
        if self._folder is None or not ids:
            return {}
        from tf_fusedrec.models.data_sets.strings import texts_of

        return texts_of(self._folder, table, ids)

    def id_of(self, table: str, text: str) -> int:
        """The id of a text: as the data set has it, an integer, or the fingerprint."""
        if self._folder is not None:
            from tf_fusedrec.models.data_sets.strings import id_of_text

            known = id_of_text(self._folder, table, text)
            if known is not None:
                return known
        try:
            return int(np.int64(int(text)))
        except (ValueError, OverflowError):
            from tf_fusedrec.data.fingerprint import hash_strings

            return int(hash_strings(text))


def _data_of(described: Mapping[str, Any]) -> pathlib.Path | None:
    """The data set that a run was trained on, if it is still there."""
    extra = described["extra"]
    folder = extra.get("data") if isinstance(extra, dict) else None
    return pathlib.Path(folder) if isinstance(folder, str) and pathlib.Path(folder).is_dir() else None


def _tables(folder: pathlib.Path, described: Mapping[str, Any], only: str | None) -> dict[str, SavedTable]:
    if only is not None and only not in described["tables"]:
        known = sorted(described["tables"])
        raise ValueError(f"--table is {only!r}, but {folder} has the tables {known}. Name one of them.")
    tables = open_tables(folder, described)
    return tables if only is None else {only: tables[only]}


def _about(folder: pathlib.Path, described: dict[str, Any]) -> tuple[Answer, list[str]]:
    save, kept = described["save"], saves.saves(folder)
    time = datetime.datetime.fromtimestamp((folder / save / manifest.NAME).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    size = saves.size_of(folder, described)
    header = {
        "checkpoint": str(folder), "format": described["format"], "ranks": described["ranks"], "written": time,
        "bytes": size, "save": save, "kept": kept, "extra": described["extra"],
    }  # fmt: skip
    ranks = described["ranks"]
    lines = [
        f"{folder}: format {described['format']}, {ranks} rank{'s' * (ranks > 1)}, {time}, {size_text(size)}",
        f"save    {save}  (kept: {', '.join(kept)})",
    ]
    experiment = described["extra"].get("experiment") if isinstance(described["extra"], dict) else None
    if isinstance(experiment, dict) and "model" in experiment:  # `extra` is any value of the user
        model = experiment["model"]
        lines.append(f"model   {model.get('kind', experiment['name'])}, dim {model['dim']}")
    return header, [*lines, ""]


def _overview(summaries: Mapping[str, TableSummary]) -> list[str]:
    heads = ("table", "rows", "dim", "dtype", "rule", "bytes", "lookups: median / max", "not seen for", "mean |row|")
    rows = [heads]
    for name, summary in summaries.items():
        counted = summary.lookups_median is not None
        lookups = f"{summary.lookups_median:,} / {summary.lookups_max:,}" if counted else "-"
        unseen = f"{summary.unseen_share:.0%} > {summary.unseen_steps:,} steps" if counted else "-"
        rows.append(
            (name, f"{summary.rows:,}", f"{summary.dim}", summary.dtype, summary.rule, size_text(summary.bytes),
             lookups, unseen, f"{summary.norm_mean:.3f}")
        )  # fmt: skip
    return columns(rows, left_aligned=(0, 3, 4))


def _details(name: str, summary: TableSummary, texts: Mapping[int, str]) -> list[str]:
    lines = ["", f"{name}: step {summary.step:,}, largest |row| {summary.norm_max:.3f}"]
    if not summary.histogram:
        return [*lines, "The table counts no lookups."]
    lines.append(f"age of the median row {summary.age_median:,} steps, of the oldest {summary.age_max:,}")
    most = max(count for *_, count in summary.histogram)
    bars: list[tuple[str, ...]] = [("lookups", "rows", "")]
    for low, high, count in summary.histogram:
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        bars.append((span, f"{count:,}", "#" * -(-BAR * count // most)))
    lines += ["", *columns(bars, left_aligned=(2,))]
    for title, rows in (("hottest", summary.hottest), ("coldest", summary.coldest)):
        lines += ["", *columns([(title, "lookups", "age", "|row|"), *(_cells(row, texts) for row in rows)])]
    return lines


def _cells(row: Row, texts: Mapping[int, str]) -> tuple[str, ...]:
    counters = ["-" if value is None else f"{value:,}" for value in (row.lookups, row.age)]
    return (shown(row.id, texts), *counters, f"{row.norm:.3f}")


def _one_row(table: SavedTable, texts: Texts, arguments: argparse.Namespace) -> tuple[Answer, list[str]]:
    row_id = texts.id_of(table.name, arguments.id)
    pair = table.find(row_id)
    if pair is None:
        raise ValueError(f"--id is {arguments.id!r} (id {row_id}), which table {table.name!r} does not have.")
    row, numbers = pair
    nearest = [(near, cosine) for near, cosine in table.nearest(numbers, arguments.rows + 1) if near != row_id]
    nearest = nearest[: arguments.rows]
    named = texts.of(table.name, [row_id, *(near for near, _ in nearest)])
    lines = columns([(table.name, "lookups", "age", "|row|"), _cells(row, named)])
    lines += ["", np.array2string(numbers, precision=4, max_line_width=100, threshold=64), ""]
    lines += columns([("nearest", "cosine"), *((shown(near, named), f"{cosine:.3f}") for near, cosine in nearest)])
    answer = {
        "table": table.name, **row_json(row, named), "row": numbers.tolist(),
        "nearest": [{"id": near, "text": named.get(near), "cosine": cosine} for near, cosine in nearest],
    }  # fmt: skip
    return answer, lines


def _changes(tables: Mapping[str, SavedTable], texts: Texts, arguments: argparse.Namespace) -> tuple[Answer, list[str]]:
    folder = checkpoint_of(arguments.against)
    if folder is None:
        raise ValueError(f"--against is {arguments.against}, which has no checkpoint. Name a run or a checkpoint.")
    before = _tables(folder, saves.read_manifest(folder), arguments.table)
    changes = {
        name: table.change_since(before[name], arguments.rows) for name, table in tables.items() if name in before
    }
    rows: list[tuple[str, ...]] = [("table", "rows", "new", "removed", "changed", "moved: mean", "most")]
    for name, change in changes.items():
        numbers = [f"{number:,}" for number in (change.rows[1], change.added, change.removed, change.changed)]
        rows.append((name, *numbers, f"{change.moved_mean:.4f}", f"{change.moved_max:.4f}"))
    lines = [f"{arguments.path} against {arguments.against}", "", *columns(rows)]
    for name in sorted(set(tables) ^ set(before)):
        lines.append(f"{name}: only in {arguments.path if name in tables else arguments.against}")
    if arguments.table in changes:
        moved = changes[arguments.table].most_moved
        named = texts.of(arguments.table, [i for i, _ in moved])
        lines += ["", *columns([("moved most", "distance"), *((shown(i, named), f"{move:.4f}") for i, move in moved)])]
    answer = {"checkpoint": str(arguments.path), "against": str(arguments.against)}
    return {**answer, "tables": {name: change._asdict() for name, change in changes.items()}}, lines


def _export(path: pathlib.Path) -> tuple[Answer, list[str]]:
    from tf_fusedrec.saved_model import applying

    described, identity = applying.describe(path), applying.identity(path)
    rows = [("table", "rows", "dim", "dtype", "bytes")]
    tables = {}
    for name, (ids, numbers) in applying.read_tables(path).items():
        form = described["tables"][name]
        tables[name] = {"rows": len(ids), **form, "bytes": ids.nbytes + numbers.nbytes}
        rows.append((name, f"{len(ids):,}", f"{form['dim']}", form["dtype"], size_text(tables[name]["bytes"])))
    version = identity.get("version", "none: an early export, which no delta fits")
    answer = {"export": str(path), "format": described["format"], "ops": described["ops"], **identity, "tables": tables}
    lines = [f"{path}: an export, format {described['format']}, ops {described['ops']!r}", f"version {version}", ""]
    return answer, [*lines, *columns(rows, left_aligned=(0, 3))]


def _delta(path: pathlib.Path) -> tuple[Answer, list[str]]:
    from tf_fusedrec.saved_model import applying

    described = applying.read_delta(path)
    base, result = described.get("identity", {}).get("version"), applying.identity(path / "model").get("version")
    rows = [("table", "changed", "removed", "dim", "dtype", "bytes")]
    tables = {}
    for name, form in described["tables"].items():
        files = {part: path / f"changes/{name}.{part}.npy" for part in ("ids", "removed", "rows")}
        changed, removed = (len(np.load(files[part], mmap_mode="r")) for part in ("ids", "removed"))
        size = sum(file.stat().st_size for file in files.values())
        tables[name] = {"changed": changed, "removed": removed, **form, "bytes": size}
        rows.append((name, f"{changed:,}", f"{removed:,}", f"{form['dim']}", form["dtype"], size_text(size)))
    answer = {"delta": str(path), "format": described["format"], "base": base, "version": result, "tables": tables}
    lines = [f"{path}: a delta of an export, format {described['format']}", f"version {base} -> {result}", ""]
    return answer, [*lines, *columns(rows, left_aligned=(0, 4))]


def _data_set(path: pathlib.Path) -> tuple[Answer, list[str]]:
    import dataclasses

    import pyarrow.parquet as pq

    from tf_fusedrec.models.data_sets.layouts import read_info

    info = read_info(path)
    rows = {
        split: sum(pq.read_metadata(file).num_rows for file in sorted((path / split).rglob("*.parquet")))
        for split in info.columns
    }
    lines = [f"{path}: {info.task} data, {info.users:,} users, {info.items:,} items", info.source, info.split, ""]
    names = list(dict.fromkeys(name for columns_of in info.columns.values() for name in columns_of))
    table = [("column", *info.columns), ("rows", *(f"{rows[split]:,}" for split in info.columns))]
    table += [(name, *(info.columns[split].get(name, "-") for split in info.columns)) for name in names]
    return {"data": str(path), **dataclasses.asdict(info), "rows": rows}, [
        *lines,
        *columns(table, left_aligned=(0, 1, 2, 3)),
    ]


READERS: dict[pathlib.Path, Callable[[pathlib.Path], tuple[Answer, list[str]]]] = {
    EXPORT: _export,
    pathlib.Path("delta.json"): _delta,
    pathlib.Path("dataset.json"): _data_set,
}


def summary_json(summary: TableSummary, texts: Mapping[int, str]) -> Answer:
    """A summary with its rows as dicts."""
    rows = {name: [row_json(row, texts) for row in getattr(summary, name)] for name in ("hottest", "coldest")}
    return {**summary._asdict(), **rows}


def row_json(row: Row, texts: Mapping[int, str]) -> Answer:
    return {**row._asdict(), "text": texts.get(row.id)}


def shown(row_id: int, texts: Mapping[int, str]) -> str:
    """An id for people: its text where that is known."""
    return texts.get(row_id, str(row_id))


def size_text(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, 3)
    return f"{size / 1024**power:,.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{size} B"


def columns(rows: Sequence[Sequence[str]], left_aligned: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table. Columns in `left_aligned` begin at the left, others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if at in left_aligned else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
