"""A save that fails leaves the last checkpoint whole, and a power cut finds data behind every name.

tests/soak cuts the power, and test_killed.py kills the process, between any two operations of a save.
"""

import os
import pathlib

import pytest

from tests.checkpoint.job import Job, Nth, save
from tf_fusedrec import checkpoint
from tf_fusedrec.files import disk


@pytest.fixture(params=[False, True], ids=["foreground", "background"])
def job(request, tmp_path):
    return Job(tmp_path / "c", background=request.param)


def test_a_full_disk_at_any_write_leaves_the_last_checkpoint(job, monkeypatch):
    save(job, "old")
    old = job.state()
    counter = Nth(disk.write, -1, None)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", counter)
        save(job, "old")
    assert counter.calls > 8
    for n in range(counter.calls):
        job.train()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write", Nth(disk.write, n, OSError(28, "No space left on device")))
            full = rf"No space left on device \(make room there.*earlier checkpoints stand\): '{job.directory}/"
            with pytest.raises(OSError, match=full):
                save(job, "new")
        assert job.loaded() == ("old", old)
        assert not list(job.directory.rglob("*.partial")) and len(checkpoint.saves(job.directory)) == 2
    save(job, "new")
    assert job.loaded() == ("new", job.state())


def test_data_are_synced_before_trusted_names(tmp_path, monkeypatch):
    """Every file is synced after its last write, then the folder of its rename. The manifest comes last."""
    log = []

    def told(name, what):
        original = getattr(os, name)

        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            log.append((name, what(args, result)))
            return result

        return call

    def path_of(descriptor):
        return os.readlink(f"/proc/self/fd/{descriptor}")

    job = Job(tmp_path / "runs" / "c", background=False)
    monkeypatch.setattr(os, "write", told("write", lambda args, _: path_of(args[0])))
    monkeypatch.setattr(os, "fsync", told("fsync", lambda args, _: path_of(args[0])))
    monkeypatch.setattr(os, "replace", told("replace", lambda args, _: (str(args[0]), str(args[1]))))
    save(job)
    mine = [entry for entry in log if str(job.directory) in str(entry[1])]
    # New folders lie in existing ones.
    assert [("fsync", str(tmp_path / "runs")), ("fsync", str(tmp_path))] == [e for e in log[:2] if e not in mine]
    written = {path for name, path in mine if name == "write"}
    assert len(written) == 6  # rows, two dense files, shard-0.json, manifests of the save and of the checkpoint
    for path in written:
        last_write = max(n for n, entry in enumerate(mine) if entry == ("write", path))
        synced = min(n for n, entry in enumerate(mine) if n > last_write and entry == ("fsync", path))
        renamed = [n for n, (name, paths) in enumerate(mine) if name == "replace" and path.startswith(paths[0])]
        assert all(synced < n for n in renamed)
    renames = [pathlib.Path(paths[1]).name for name, paths in mine if name == "replace"]
    (folder,) = job.directory.glob("save-*")
    assert renames == ["shard-0.json", "manifest.json", folder.name, "manifest.json"]
    told_others = next(n for n, (name, _) in enumerate(mine) if name == "replace")
    rows = next(n for n, (name, path) in enumerate(mine) if name == "fsync" and str(path).endswith(".shard"))
    assert ("fsync", f"{folder}.partial") in mine[rows:told_others]
    last = max(n for n, (name, _) in enumerate(mine) if name == "replace")
    assert mine[last + 1 :] == [("fsync", str(job.directory))]
    for n, (name, paths) in enumerate(mine):
        assert name != "replace" or mine[n + 1] == ("fsync", str(pathlib.Path(paths[1]).parent))


def test_the_folder_may_be_renamed_once_the_last_shard_is_reported(tmp_path, monkeypatch):
    """Rank 0 waits for the report, and the last rank may be slow to sync it."""
    (tmp_path / "save.partial").mkdir()
    replace = os.replace

    def replaced_and_committed(old, new):
        replace(old, new)
        replace(tmp_path / "save.partial", tmp_path / "save")

    monkeypatch.setattr(os, "replace", replaced_and_committed)
    disk.write_durably(tmp_path / "save.partial" / "shard-1.json", "{}")
    assert (tmp_path / "save" / "shard-1.json").read_text(encoding="utf-8") == "{}"
