"""One save: tables are copied, every rank writes its shard, rank 0 makes the whole a checkpoint. No collectives here.

Ranks meet on the file system, since they write while training goes on with its own collectives: a rank whose files are
on the disk says so by shard-<rank>.json, one that has failed by shard-<rank>.failed, and rank 0 waits for these.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec.checkpoint import dense, disk, folders, manifest, shard_file, verdict
from tf_fusedrec.checkpoint.schema import TOMBSTONES
from tf_fusedrec.exchange import weight_equality
from tf_fusedrec.tables.hash_order import hash_range_owner

_POLL_S = 0.01


class Plan(NamedTuple):
    """What a save will be; the same on all ranks."""

    save: str  # its name, unique
    ranks: int
    # Of a delta: by table, the parts of the full save that it goes with and the clock then. None: this one is full.
    full: dict[str, list] | None
    since: dict[str, int]


class Cut(NamedTuple):
    """A copy of what this rank holds of one table."""

    name: str
    described: dict[str, Any]  # spec, owner, clock, iterations, learning_rate: fields of the manifest
    sections: dict[str, tuple[np.ndarray, np.ndarray]]  # ids and records, in any order
    whole: dict[str, bool]  # whether a section holds all there is, or changes
    piece: int  # which range of hashes, of as many as there are ranks, the rows of a table of owner "hash_range" lie in


def iterations(table: Any) -> int | None:
    """Steps that the optimizer of a backend has counted: Adam's bias correction and schedules hang on them."""
    counted = getattr(table.optimizer, "iterations", None)
    return None if counted is None else int(counted.numpy())


def rates(table: Any) -> list[float] | None:
    """Learning rates of a native table, see optimizers.Trainer.rates; None where there is nothing to restore."""
    return getattr(table.optimizer, "rates", None)


def keeps_changes(table: Any) -> bool:
    """Whether a backend knows which rows have changed, as deltas need."""
    return "updated" in (table.record_dtype("rows").names or ())


def counters(clock: int) -> tuple[int, int]:
    """Changes and training lookups that a backend has counted: its `clock` is both in one number."""
    return clock >> 32, clock & 0xFFFFFFFF


def latest(clocks: Iterable[int]) -> int:
    """The clock that no counter of `clocks` is ahead of."""
    changes, lookups = zip(*map(counters, clocks))
    return max(changes) << 32 | max(lookups)


def make_plan(directory: pathlib.Path, ranks: int, full: str | None, since: Mapping[str, int]) -> Plan:
    """Begins a save: removes what an interrupted one left, names this one, makes its folder. Rank 0 calls it.

    Args:
      directory: of the checkpoint.
      ranks: R.
      full: name of the full save that a delta goes with; None begins a full one.
      since: clock of each table at that save.

    Raises:
      ValueError: `directory` holds something else than a checkpoint of this format, or no longer the full save.
      NotADirectoryError: `directory` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"directory {os.fspath(directory)} is a file, not a folder. Name another.")
    disk.make_folder(directory)
    last = manifest.read(directory) if manifest.exists(directory) else None
    parts = None
    if full is not None:
        tables = {} if last is None else last["tables"]
        parts = {name: [part for part in table["parts"] if part["save"] == full] for name, table in tables.items()}
        if last is None or not all(parts.values()):
            raise ValueError(
                f"{directory} no longer holds the full save {full} that this delta goes with: another job has saved "
                "there. Give every job a directory of its own."
            )
    return Plan(folders.begin(directory), ranks, parts, dict(since))


def cut_tables(tables: Sequence[Any], plan: Plan, piece: int, replicas: int = 1) -> Iterator[Cut]:
    """Copies of this rank's tables, or of what has changed in them, one after another.

    Args:
      tables: backends of one layer.
      plan: of the save.
      piece: number of the range of hashes, of plan.ranks, that this rank writes.
      replicas: ranks that hold the same rows: rows are limited to the range where there are several.
    """

    def meant(ids: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if replicas == 1:
            return ids, records
        mine = hash_range_owner(ids, plan.ranks) == piece
        return ids[mine], records[mine]

    for table in tables:
        for name in table.names:
            sections, whole = {}, {}
            for section in table.sections:
                whole[section] = plan.full is None or "updated" not in (table.record_dtype(section).names or ())
                since = None if whole[section] else plan.since[name]
                sections[section] = meant(*table.snapshot(name, section, since, in_hash_order=False))
            if plan.full is not None:
                removed = np.asarray(table.tombstones(name), np.int64)
                sections[TOMBSTONES] = meant(removed, np.empty([len(removed)], np.dtype([])))
                whole[TOMBSTONES] = False
            described = {
                "spec": table.spec(name), "owner": table.owner, "clock": int(table.clock),
                "iterations": iterations(table), "learning_rate": rates(table),
            }  # fmt: skip
            yield Cut(name, described, sections, whole, piece)


def write_shard(
    directory: pathlib.Path,
    plan: Plan,
    cuts: Iterable[Cut],
    rank: int,
    weights: dense.Weights = dense.NO_WEIGHTS,
) -> None:
    """Writes the files of one rank, and says so when they are on the disk: with what it has found in them.

    Args:
      directory: of the checkpoint.
      plan: of the save.
      cuts: the tables.
      rank: number of this rank.
      weights: dense weights, of which rank 0 writes what it has: all ranks must have equal ones.

    Raises:
      OSError: for example a full disk; the other ranks can see it.
    """
    folder = directory / (plan.save + folders.PARTIAL)
    tables, bad = {}, [verdict.bad_weight([*weights.trained, *weights.others])]
    for cut in cuts:
        for section, (ids, records) in cut.sections.items():
            label = shard_file.Label(plan.save, cut.name, section, cut.piece, plan.ranks)
            shard_file.write(folder / manifest.shard_name(cut.name, section, cut.piece), label, ids, records)
            bad.append(verdict.bad_row(cut.name, ids, records))
        tables[cut.name] = {**cut.described, "sections": cut.whole}
    disk.sync_folder(folder)
    told = {
        "tables": tables,
        "dense": weight_equality.digests(weights.trained),
        "not_finite": [what for what in bad if what],
    }
    disk.write_durably(folder / f"shard-{rank}.json", json.dumps(told))


def give_up(directory: pathlib.Path, plan: Plan, rank: int, error: BaseException) -> None:
    """Tells rank 0 that this rank's shard will not come. Does what it can: the disk may be full, or gone."""
    path = directory / (plan.save + folders.PARTIAL) / f"shard-{rank}.failed"
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
) -> None:
    """Waits for all shards, makes them the checkpoint, and removes saves that are not kept. Rank 0 calls it.

    Args:
      directory: of the checkpoint.
      plan: of the save.
      dense_files: contents by name.
      extra: JSON-able.
      timeout_s: seconds to wait for the other ranks.
      keep: saves to keep, this one included.
      finite: whether a number that is not finite refuses the save.

    Raises:
      RuntimeError: a rank has given up, or told nothing for timeout_s seconds. OSError: for example a full disk.
      ValueError: dense weights differ between ranks. NotFinite: a number is not finite.
    """
    folder = directory / (plan.save + folders.PARTIAL)
    dense_entries = dense.write(folder, dense_files)
    shards = [_wait_for(folder, rank, time.monotonic() + timeout_s, plan) for rank in range(plan.ranks)]
    verdict.check_equal(shards)
    if finite:
        verdict.check_finite(shards)
    tables = {}
    for name, described in shards[0]["tables"].items():
        part = {"save": plan.save, "ranks": plan.ranks, "sections": described.pop("sections")}
        clock = latest(shard["tables"][name]["clock"] for shard in shards)
        tables[name] = {**described, "clock": clock, "parts": [*(plan.full or {}).get(name, []), part]}
    fields = {"save": plan.save, "ranks": plan.ranks, "extra": extra, "dense": dense_entries, "tables": tables}
    manifest.write(folder, fields)
    disk.rename(folder, directory / plan.save)
    manifest.write(directory, fields)
    folders.prune(directory, keep)


def _wait_for(folder: pathlib.Path, rank: int, deadline: float, plan: Plan) -> dict[str, Any]:
    told, failed = folder / f"shard-{rank}.json", folder / f"shard-{rank}.failed"
    while not told.exists():
        if failed.exists():
            raise RuntimeError(
                f"Rank {rank} could not write its part of {plan.save}. {failed.read_text(encoding='utf-8')}".rstrip()
            )
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank {rank} has not written its part of {plan.save} in time. Is it alive, and does it see "
                f"{os.fspath(folder)}? The last checkpoint stands."
            )
        time.sleep(_POLL_S)
    return json.loads(told.read_text(encoding="utf-8"))
