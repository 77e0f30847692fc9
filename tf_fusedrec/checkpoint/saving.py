"""One save: ranks copy their tables, every rank writes its shard, and rank 0 checks and commits the checkpoint.

This module uses no collectives, because it writes while training runs its own. The ranks synchronize through files: a
rank writes shard-<rank>.json once its files are on the disk, or shard-<rank>.failed. Rank 0 waits for these files. In
a save all numbers are finite and dense weights are equal on all ranks: every rank checks its copies in the background
thread, and rank 0 compares the reports.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec.checkpoint import dense
from tf_fusedrec.exchange import model_state
from tf_fusedrec.files import disk, manifest, saves, shard_file
from tf_fusedrec.files.hash_order import hash_range_owner
from tf_fusedrec.files.manifest import TOMBSTONES, latest_clock
from tf_fusedrec.tables.records import counters_of

_POLL_S = 0.01
_CHUNK_BYTES = 1 << 24  # bytes checked at once
CHOICES = ("refuse", "skip", "save")


class NotFinite(ValueError):
    """A weight, a row or a slot of a save is not finite."""


class Plan(NamedTuple):
    """Description of a save, the same on all ranks."""

    save: str  # unique name
    ranks: int  # number of ranks
    full: dict[str, list] | None  # delta: parts of its full save, by table; None: this save is full
    since: dict[str, int]  # delta: clock of each table at its full save


class TableCopy(NamedTuple):
    """A copy of this rank's rows of one table."""

    name: str
    described: dict[str, Any]  # fields of the manifest: spec, owner, clock, iterations, learning_rate
    sections: dict[str, tuple[np.ndarray, np.ndarray]]  # ids and records of each section, in any order
    complete: dict[str, bool]  # whether each section is complete; otherwise it has changes
    hash_range: int  # number of the rows' hash range, in [0, ranks), for a table of owner "hash_range"


def keeps_changes(table: Any, section: str = "rows") -> bool:
    """Returns whether a backend tracks changed rows. Deltas need that."""
    return "updated" in (table.record_dtype(section).names or ())


def make_plan(directory: pathlib.Path, ranks: int, full: str | None, since: Mapping[str, int]) -> Plan:
    """Begins a save: removes the remains of interrupted saves and makes a new folder. Only rank 0 calls it.

    For a delta, `full` is the name of its full save, and `since` the clock of each table at that save. `full=None`
    begins a full save.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"folder must be a folder, but {os.fspath(directory)} is a file. Use another path.")
    disk.make_folder(directory)
    last = manifest.read(directory) if manifest.exists(directory) else None
    parts = None
    if full is not None:
        tables = {} if last is None else last["tables"]
        parts = {name: [part for part in table["parts"] if part["save"] == full] for name, table in tables.items()}
        if last is None or not all(parts.values()):
            raise ValueError(
                f"{directory} no longer holds the full save {full} that this delta needs: another job has saved "
                "there. Give every job its own folder."
            )
    return Plan(saves.begin(directory), ranks, parts, dict(since))


def copy_tables(tables: Sequence[Any], plan: Plan, hash_range: int, replicas: int = 1) -> Iterator[TableCopy]:
    """Yields copies of this rank's tables, of all rows or, for a delta, of changed rows.

    With several replicas, ranks with the same rows, only rows of hash range `hash_range` of plan.ranks are copied.
    """

    def in_range(ids: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if replicas == 1:
            return ids, records
        kept = hash_range_owner(ids, plan.ranks) == hash_range
        return ids[kept], records[kept]

    for table in tables:
        for name in table.names:
            sections, complete = {}, {}
            for section in table.sections_of(name):
                complete[section] = plan.full is None or not keeps_changes(table, section)
                since = None if complete[section] else plan.since[name]
                sections[section] = in_range(*table.snapshot(name, section, since, in_hash_order=False))
            if plan.full is not None:
                removed = np.asarray(table.tombstones(name), np.int64)
                sections[TOMBSTONES] = in_range(removed, np.empty([len(removed)], np.dtype([])))
                complete[TOMBSTONES] = False
            described = {"spec": table.spec(name), "owner": table.owner, **counters_of(table)}
            yield TableCopy(name, described, sections, complete, hash_range)


def write_shard(
    directory: pathlib.Path,
    plan: Plan,
    tables: Iterable[TableCopy],
    rank: int,
    weights: dense.Weights = dense.NO_WEIGHTS,
) -> None:
    """Writes the files of one rank, then its report, shard-<rank>.json, with digests of weights that must be equal."""
    folder = directory / (plan.save + saves.PARTIAL)
    described, faults = {}, [non_finite_weight([*weights.equal, *weights.rest])]
    with disk.synced_folder(folder):
        for copy in tables:
            for section, (ids, records) in copy.sections.items():
                label = shard_file.Label(plan.save, copy.name, section, copy.hash_range, plan.ranks)
                shard_file.write(folder / manifest.shard_name(copy.name, section, copy.hash_range), label, ids, records)
                faults.append(_non_finite_row(copy.name, ids, records))
            described[copy.name] = {**copy.described, "sections": copy.complete}
    report = {
        "tables": described,
        "dense": [*model_state.digests(weights.equal), *weights.vocabularies],
        "not_finite": [fault for fault in faults if fault],
    }
    disk.write_durably(folder / f"shard-{rank}.json", json.dumps(report))


def give_up(directory: pathlib.Path, plan: Plan, rank: int, error: BaseException) -> None:
    """Reports by shard-<rank>.failed that this rank failed. Errors are ignored: the disk may be full or gone."""
    path = directory / (plan.save + saves.PARTIAL) / f"shard-{rank}.failed"
    try:
        path.touch()
        path.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    except OSError:
        return


def commit(
    directory: pathlib.Path,
    plan: Plan,
    dense_files: Mapping[str, bytes],
    extra: Any,
    timeout_s: float,
    *,
    keep: int = 1,
    finite: bool = True,
    best: bool = False,
) -> None:
    """Waits for all shards, makes them the checkpoint, and removes old saves. Only rank 0 calls it.

    `keep` counts this save. `finite` refuses a NaN or infinite number. `best` keeps it until another save is the best.
    """
    folder = directory / (plan.save + saves.PARTIAL)
    dense_entries = dense.write(folder, dense_files)
    shards = [_wait_for(folder, rank, time.monotonic() + timeout_s, plan) for rank in range(plan.ranks)]
    _check_equal(shards)
    if finite:
        _check_finite(shards)
    tables = {}
    for name, described in shards[0]["tables"].items():
        part = {"save": plan.save, "ranks": plan.ranks, "sections": described.pop("sections")}
        clock = latest_clock(shard["tables"][name]["clock"] for shard in shards)
        tables[name] = {**described, "clock": clock, "parts": [*(plan.full or {}).get(name, []), part]}
    fields = {"save": plan.save, "ranks": plan.ranks, "extra": extra, "dense": dense_entries, "tables": tables}
    manifest.write(folder, fields)
    disk.rename(folder, directory / plan.save)
    if best:
        disk.write_durably(directory / saves.BEST, json.dumps({"save": plan.save}))
    manifest.write(directory, fields)
    saves.prune(directory, keep)


def _wait_for(folder: pathlib.Path, rank: int, deadline: float, plan: Plan) -> dict[str, Any]:
    report, failed = folder / f"shard-{rank}.json", folder / f"shard-{rank}.failed"
    while not report.exists():
        if failed.exists():
            raise RuntimeError(
                f"Rank {rank} could not write its part of {plan.save}. {failed.read_text(encoding='utf-8')}".rstrip()
            )
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank {rank} has not written its part of {plan.save} in time; the last checkpoint stays. Check that "
                f"the rank is alive and sees {os.fspath(folder)}."
            )
        time.sleep(_POLL_S)
    return json.loads(report.read_text(encoding="utf-8"))


def _non_finite_row(table: str, ids: np.ndarray, records: np.ndarray) -> str | None:
    """Words that name the first non-finite row or slot; None if all are finite. <u2 fields are bits of bfloat16."""
    dtypes = {field: records.dtype[field].base for field in records.dtype.names or ()}
    step = max(_CHUNK_BYTES // max(records.dtype.itemsize, 1), 1)
    for begin in range(0, len(ids), step):
        for field, dtype in dtypes.items():
            if dtype.kind != "f" and dtype != "<u2":
                continue
            values = records[field][begin : begin + step]
            finite = np.isfinite(values) if dtype.kind == "f" else (values & 0x7F80) != 0x7F80
            rows = finite.reshape(len(values), -1).all(axis=1)
            if not rows.all():
                return f"{field!r} of id {ids[begin + int(np.flatnonzero(~rows)[0])]} of table {table!r}"
    return None


def non_finite_weight(weights: Sequence[tuple[str, np.ndarray]]) -> str | None:
    """Words that name the first non-finite weight; None if all are finite. Integers are always finite."""
    for name, value in weights:
        if value.dtype.kind in "fcV" and not np.isfinite(value).all():
            return f"dense weight {name!r}"
    return None


def _check_equal(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all ranks have the same tables and equal dense weights."""
    for rank, report in enumerate(reports):
        specs, want = ({name: table["spec"] for name, table in r["tables"].items()} for r in (report, reports[0]))
        if specs != want:
            raise ValueError(
                f"Rank {rank} has the tables {specs}, but rank 0 has {want}. Build the same model on all ranks."
            )
    difference = model_state.difference(
        [[model_state.Digest(*digest) for digest in report["dense"]] for report in reports]
    )
    if difference is not None:
        raise ValueError(
            f"Ranks do not hold the same dense weights: {difference}. This save is refused, because a checkpoint keeps "
            "the weights of rank 0 only; earlier checkpoints stay. Build the same model on all ranks and compile it "
            "with collectives.distributed_optimizer, which gives all ranks equal initial weights and gradients."
        )


def _check_finite(reports: Sequence[Mapping[str, Any]]) -> None:
    faults = [f"{words} (rank {rank})" for rank, report in enumerate(reports) for words in report["not_finite"]]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise NotFinite(
            f"{', '.join(faults[:3])}{more} is not finite, but a checkpoint must be. This save is refused, and earlier "
            "checkpoints stay. Load an earlier save (checkpoint.saves lists them) and look for the cause, such as a "
            "learning rate that is too high or a NaN in the data. not_finite='save' saves anyway."
        )
