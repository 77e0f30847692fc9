"""Every test run includes a short soak, and the soak finds planted faults."""

import contextlib
import os
import pathlib
import random
import sys

import pytest

from tests.soak import __main__ as program
from tests.soak.exports import ExportMachine
from tests.soak.killed import killed_at
from tests.soak.machine import Machine
from tests.soak.parts import run_machine
from tests.soak.power_loss import Crashed, PowerLoss
from tests.soak.ranks import Ranks
from tf_fusedrec import checkpoint
from tf_fusedrec.checkpoint.loading import read_tables
from tf_fusedrec.files import disk

POLICIES = {"momentum": 0.5, "tier_folder": "", "record_tombstones": True}


@pytest.mark.parametrize(
    ("machine", "examples", "among"),
    [
        (Machine, 12, ["save all", "load anew"]),
        (ExportMachine, 2, ["export stock", "export ours", "export a delta", "apply a delta"]),
    ],
    ids=["tables", "exports"],
)
def test_any_order_of_operations_agrees_with_dictionaries(machine, examples, among):
    counts = run_machine(machine, 3, examples, shrink=False)
    print(dict(counts))
    assert counts["examples"] >= examples and all(counts[rule] for rule in among)


def unsynced_file(path):
    """Equals disk.new_file without its fsync."""

    @contextlib.contextmanager
    def opened():
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        yield file
        os.close(file)

    return opened()


def unsynced_rename(old, new):
    os.replace(old, new)


DEFECTS = {"none": {}, "files": {"new_file": unsynced_file}, "folders": {"rename": unsynced_rename}}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_save_that_is_not_synced_is_found(defect, tmp_path, monkeypatch):
    job = Ranks(1, POLICIES)
    refused = 0
    for chance in range(12):
        job.train([([chance, 1], [2])], chance)
        for name, replacement in DEFECTS[defect].items():
            monkeypatch.setattr(disk, name, replacement)
        root = tmp_path / str(chance)
        root.mkdir()
        loss = PowerLoss(root)
        with loss:
            job.save(root / "c", chance, delta=False)
        monkeypatch.undo()
        loss.crash(random.Random(chance))
        try:
            other = Ranks(2, POLICIES)
            other.load(root / "c", job.saved())
            other.check()
        except (ValueError, AssertionError):
            refused += 1
    assert (refused > 0) == (defect != "none")


def test_a_save_that_is_being_removed_never_passes_for_a_whole_one(tmp_path):
    for chance in range(90):
        job, root = Ranks(1, POLICIES), tmp_path / str(chance)
        root.mkdir()
        for number, delta in enumerate([False, True, False]):
            job.train([([number, 1], [2])], number)
            job.save(root / "c", number, delta=delta)
        loss = PowerLoss(root, crash_at=chance)
        with contextlib.suppress(Crashed), loss:
            job.save(root / "c", 3, delta=False)  # The first full save and its delta are no longer kept.
        loss.crash(random.Random(chance))
        for save in checkpoint.saves(root / "c"):
            tables = read_tables(root / "c", save)
            assert all(len(table.ids) == len(table.rows) for table in tables.values())


def crashes(folder, work):
    """Returns the observed states {path: bytes} of `folder` after a crash that follows `work`."""
    found = set()
    for seed in range(120):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        loss = PowerLoss(folder)
        with loss:
            work(folder)
        loss.crash(random.Random(seed))
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        found.add(tuple(sorted(files.items())))
    return found


def write(path, data, *, sync):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(file, data)
    if sync:
        os.fsync(file)
    os.close(file)


def sync_folder(folder):
    file = os.open(folder, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def test_power_takes_what_is_not_synced_and_nothing_else(tmp_path):
    def nothing_synced(folder):
        write(folder / "a", b"1", sync=False)

    def only_the_file(folder):
        write(folder / "a", b"1", sync=True)

    def only_the_name(folder):
        write(folder / "a", b"1", sync=False)
        sync_folder(folder)

    def all_of_it(folder):
        write(folder / "a", b"1", sync=True)
        sync_folder(folder)

    def renamed(folder):
        all_of_it(folder)
        os.replace(folder / "a", folder / "b")

    whole, gone = (("a", b"1"),), ()
    torn = {(("a", data),) for data in (b"", b"1", b"\0")}
    assert crashes(tmp_path, nothing_synced) == {gone, *torn}
    assert crashes(tmp_path, only_the_file) == {gone, whole}
    assert crashes(tmp_path, only_the_name) == torn
    assert crashes(tmp_path, all_of_it) == {whole}
    assert crashes(tmp_path, renamed) == {whole, (("b", b"1"),)}


def test_a_process_is_killed_before_its_nth_change(tmp_path):
    for n in range(3):
        with pytest.raises(Crashed), killed_at(tmp_path, n):
            for name in ("0", "1", "2"):
                (tmp_path / f"{n}-{name}").write_text(name, encoding="utf-8")
        assert len(list(tmp_path.glob(f"{n}-*"))) == n
    (tmp_path / "after").touch()


@pytest.mark.parametrize(
    ("script", "seeds", "words"),
    [
        ('echo "seed 7"; echo \'soak counts: {"seeds": 4}\'', 4, ""),
        ('echo "seed 7"; echo "it broke"; exit 3', 0, "exit code 3). Again: python -m tests.soak files --seed 7"),
        ('echo "seed 7"; kill -SEGV $$', 0, "exit code -11). Again: python -m tests.soak files --seed 7"),
        ('echo "seed 7"; exec sleep 60', 0, "--seed 7"),
    ],
    ids=["right", "violation", "crash", "hang"],
)
def test_a_turn_that_ends_badly_names_its_seed(script, seeds, words, tmp_path, monkeypatch):
    executable = pathlib.Path(tmp_path / "python")
    executable.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr(program, "LONGEST_SEED_S", 1)
    counts, failure = program.turn_of("files", 1)
    assert counts["seeds"] == seeds and failure.endswith(words) and bool(failure) == bool(words)


def test_a_violation_makes_the_soak_fail_and_counts_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(program.sanitized_ops, "build", lambda: None)
    monkeypatch.setattr(program, "turn_of", lambda part, seconds: ({"seeds": 1}, "VIOLATION" if part == "ops" else ""))
    monkeypatch.setattr(sys, "argv", ["soak", "--seconds", "0.01"])
    assert program.main() == 1
    assert "soak: tables: 1 seeds" in capsys.readouterr().out
