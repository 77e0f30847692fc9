"""Every test run includes a short soak, and the soak finds planted faults."""

import contextlib
import os
import random

import pytest

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


def test_a_process_is_killed_before_its_nth_change(tmp_path):
    for n in range(3):
        with pytest.raises(Crashed), killed_at(tmp_path, n):
            for name in ("0", "1", "2"):
                (tmp_path / f"{n}-{name}").write_text(name, encoding="utf-8")
        assert len(list(tmp_path.glob(f"{n}-*"))) == n
    (tmp_path / "after").touch()
