"""A save that fails, at any moment and for any reason, leaves the last checkpoint; what surfaces where."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.tables import DictTable, contents, embedding_of, ranks_of
from tf_fusedrec import checkpoint, keras
from tf_fusedrec.checkpoint import disk, manifest, saving


def model():
    return keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])


def trained(table, seed=0):
    table.train("item", np.random.default_rng(seed).integers(-(2**63), 2**63, 40).tolist(), np.random.default_rng(seed))
    return table


class Job:
    """One model and table, as a training job has them."""

    def __init__(self, directory, **options):
        self.directory = pathlib.Path(directory)
        self.model, self.table = model(), trained(DictTable("item"))
        self.embedding = embedding_of(self.table)
        self.checkpointer = checkpoint.Checkpointer(self.directory, self.model, self.embedding, **options)

    def train(self):
        trained(self.table, self.table.clock)
        self.model.set_weights([w + 1 for w in self.model.get_weights()])

    def state(self):
        return contents([self.table]), [w.tolist() for w in self.model.get_weights()]

    def loaded(self):
        """extra and state of what a new job finds in the directory."""
        other = Job(self.directory)
        other.table.clear()
        extra = checkpoint.load(self.directory, other.model, other.embedding)
        return extra, other.state()


@pytest.fixture(params=[False, True], ids=["foreground", "background"])
def job(request, tmp_path):
    return Job(tmp_path / "c", background=request.param)


def save(job, extra=None):
    job.checkpointer.save(extra)
    job.checkpointer.wait()


class Nth:
    """Calls a function; at its n-th call it raises instead."""

    def __init__(self, function, n, error):
        self.function, self.left, self.error = function, n, error
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls - 1 == self.left:
            raise self.error
        return self.function(*args, **kwargs)


def test_what_is_loaded_is_what_was_saved_last(job):
    for extra in ({"epoch": 1}, [2], None):
        job.train()
        save(job, extra)
        assert job.loaded() == (extra, job.state())
    assert len(list(job.directory.iterdir())) == 2  # the manifest and one save


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
            with pytest.raises(OSError, match="No space left on device"):
                save(job, "new")
        assert job.loaded() == ("old", old)
    save(job, "new")
    assert job.loaded() == ("new", job.state())


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


OPERATIONS = [(os, "write"), (os, "fsync"), (os, "replace"), (os, "open"), (shutil, "rmtree"), (os, "mkdir")]


def test_a_crash_between_any_two_operations_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    job = Job(tmp_path / "c", background=False)
    save(job, "0")
    states = {"0": job.state()}
    found = []
    monkeypatch.setattr(saving, "give_up", lambda *_: None)
    for module, name in OPERATIONS:
        n, done = 0, False
        while not done:
            job.train()
            with monkeypatch.context() as patch:
                last = Nth(getattr(module, name), n, Killed())
                patch.setattr(module, name, last)
                label = f"{name} {n}"
                states[label] = job.state()
                try:
                    save(job, label)
                    done = True
                except Killed:
                    n += 1
            extra, state = job.loaded()
            assert state == states[extra]
            assert not done or extra == label
            found.append(extra == label)
        assert n > 0, name
    assert found.count(False) > 20 and found.count(True) > len(OPERATIONS)


def test_data_are_on_the_disk_before_names_that_others_trust(tmp_path, monkeypatch):
    """Every file is synced after its last write, its folder after that; the manifest is renamed last of all."""
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

    job = Job(tmp_path / "c", background=False)
    monkeypatch.setattr(os, "write", told("write", lambda args, _: path_of(args[0])))
    monkeypatch.setattr(os, "fsync", told("fsync", lambda args, _: path_of(args[0])))
    monkeypatch.setattr(os, "replace", told("replace", lambda args, _: (str(args[0]), str(args[1]))))
    save(job)
    mine = [entry for entry in log if str(job.directory) in str(entry[1])]
    written = {path for name, path in mine if name == "write"}
    assert len(written) == 5  # rows, two dense files, shard-0.json, manifest
    for path in written:
        last_write = max(n for n, entry in enumerate(mine) if entry == ("write", path))
        synced = min(n for n, entry in enumerate(mine) if n > last_write and entry == ("fsync", path))
        renamed = [n for n, (name, paths) in enumerate(mine) if name == "replace" and path.startswith(paths[0])]
        assert all(synced < n for n in renamed)
    renames = [pathlib.Path(paths[1]).name for name, paths in mine if name == "replace"]
    (folder,) = job.directory.glob("save-*")
    assert renames == ["shard-0.json", folder.name, "manifest.json"]
    last = max(n for n, (name, _) in enumerate(mine) if name == "replace")
    assert mine[last + 1 :] == [("fsync", str(job.directory))]
    for n, (name, paths) in enumerate(mine):
        assert name != "replace" or mine[n + 1] == ("fsync", str(pathlib.Path(paths[1]).parent))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_file_system_that_is_full_keeps_the_last_checkpoint_and_recovers(small_disk, background):
    job = Job(small_disk / "c", background=background)
    save(job, "old")
    old = job.state()
    (small_disk / "other").write_bytes(bytes(250_000))
    job.table.train("item", range(1000), np.random.default_rng(0))
    with pytest.raises(OSError, match="No space left on device"):
        save(job, "new")
    assert job.loaded() == ("old", old)
    (small_disk / "other").unlink()
    save(job, "new")
    assert job.loaded() == ("new", job.state())


def test_a_rank_that_has_failed_is_named_at_once(tmp_path):
    plan = saving.make_plan(tmp_path, 2, None, {})
    table = DictTable("item")
    saving.write_shard(tmp_path, plan, saving.cut_tables([table], plan), 0)
    saving.give_up(tmp_path, plan, 1, OSError(28, "No space left on device"))
    with pytest.raises(
        RuntimeError, match=f"Rank 1 could not write its part of {plan.save}. OSError: .* No space left"
    ):
        saving.commit(tmp_path, plan, {}, None, timeout_s=60)
    assert not checkpoint.exists(tmp_path)


def test_a_rank_that_tells_nothing_is_named_in_time(tmp_path):
    plan = saving.make_plan(tmp_path, 3, None, {})
    for rank in (0, 2):
        saving.write_shard(tmp_path, plan, saving.cut_tables([DictTable("item")], plan), rank)
    with pytest.raises(RuntimeError, match=f"Rank 1 has not written its part of {plan.save} in time. Is it alive"):
        saving.commit(tmp_path, plan, {}, None, timeout_s=0.05)


def test_ranks_may_be_late(tmp_path):
    """Rank 0 waits for the others, in any order."""
    plan = saving.make_plan(tmp_path, 3, None, {})
    tables = ranks_of(lambda: DictTable("item"), 3, trained)

    def others():
        for rank in (2, 1, 0):
            saving.write_shard(tmp_path, plan, saving.cut_tables([tables[rank]], plan), rank)

    thread = threading.Timer(0.1, others)
    thread.start()
    saving.commit(tmp_path, plan, {}, None, timeout_s=20)
    read = ranks_of(lambda: DictTable("item"), 2)
    simulated.load(tmp_path, read)
    assert contents(read) == contents(tables)


@pytest.fixture
def gate(monkeypatch):
    """Holds back all writing of shards until it is set."""
    opened, write_shard = threading.Event(), saving.write_shard

    def later(*args):
        assert opened.wait(20)
        write_shard(*args)

    monkeypatch.setattr(saving, "write_shard", later)
    return opened


def test_training_goes_on_while_a_copy_is_written(tmp_path, gate):
    job = Job(tmp_path / "c")
    at_save = job.state()
    extra = {"step": [1]}
    job.checkpointer.save(extra)
    extra["step"].append(2)
    for _ in range(3):
        job.train()
    job.table.remove("item", list(job.table.rows["rows"]["item"])[:5])
    assert not checkpoint.exists(job.directory)
    gate.set()
    job.checkpointer.wait()
    assert job.loaded() == ({"step": [1]}, at_save)


def test_one_save_is_written_at_a_time(tmp_path, gate):
    job = Job(tmp_path / "c")
    job.checkpointer.save(1)
    job.train()
    threading.Timer(0.2, gate.set).start()
    job.checkpointer.save(2)  # returns when the first is a checkpoint and the second is copied
    assert gate.is_set() and checkpoint.read_manifest(job.directory)["extra"] in (1, 2)
    job.checkpointer.wait()
    assert job.loaded() == (2, job.state())


def test_what_failed_behind_training_surfaces_once_at_the_next_save_or_wait(tmp_path, monkeypatch):
    job = Job(tmp_path / "c", full_every=10)
    save(job, 1)
    for call in (lambda: job.checkpointer.save(3), job.checkpointer.wait):
        job.train()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write", Nth(disk.write, 2, OSError(28, "No space left on device")))
            job.checkpointer.save(2)  # does not raise
            job.checkpointer._thread.join()
        with pytest.raises(OSError, match="No space left"):
            call()
        job.checkpointer.wait()  # and not again
        save(job, 4)
        assert len(checkpoint.read_manifest(job.directory)["tables"]["item"]["parts"]) == 1, "the next save is full"
        assert job.loaded() == (4, job.state())


def test_every_nth_save_is_full(tmp_path):
    job = Job(tmp_path / "c", full_every=3)
    parts = []
    for step in range(8):
        job.train()
        job.table.remove("item", list(job.table.rows["rows"]["item"])[:3])
        save(job, step)
        parts.append(len(checkpoint.read_manifest(job.directory)["tables"]["item"]["parts"]))
        assert job.loaded() == (step, job.state())
        saves = {folder.name for folder in job.directory.glob("save-*")}
        assert saves == manifest.saves_of(checkpoint.read_manifest(job.directory))
    assert parts == [1, 2, 2, 1, 2, 2, 1, 2]


def test_deltas_are_refused_where_changes_or_removals_are_not_known(tmp_path):
    with pytest.raises(
        ValueError, match=r"full_every must be 1 for tables \['item'\], got 2: .* which rows have changed"
    ):
        checkpoint.Checkpointer(tmp_path, model(), embedding_of(DictTable("item", changes=False)), full_every=2)
    table = DictTable("item")
    table.records_tombstones = False
    with pytest.raises(ValueError, match="rows that leave them would come back .* Set record_tombstones=True"):
        checkpoint.Checkpointer(tmp_path, model(), embedding_of(table), full_every=2)
    with pytest.raises(ValueError, match="full_every must be >= 1, got 0"):
        checkpoint.Checkpointer(tmp_path, model(), embedding_of(table), full_every=0)


def test_a_delta_without_its_full_save_is_refused(tmp_path):
    job, other = Job(tmp_path / "c", full_every=5), Job(tmp_path / "c")
    save(job)
    save(other)
    with pytest.raises(ValueError, match="no longer holds the full save save-1-[0-9a-f]+ .* a directory of its own"):
        job.checkpointer.save()


def test_extra_that_json_does_not_know_is_refused_before_anything_is_written(job):
    save(job, "old")
    with pytest.raises(TypeError, match="not JSON serializable"):
        job.checkpointer.save({1, 2})
    assert job.loaded()[0] == "old"


def test_what_an_interrupted_save_left_goes_and_what_is_not_ours_stays(job):
    job.directory.mkdir()
    (job.directory / "save-3-dead.partial").mkdir()
    (job.directory / "save-3-dead.partial" / "item.rows-0.shard").write_bytes(b"x")
    (job.directory / "save-9-dead").mkdir()
    (job.directory / "notes.txt").write_text("mine")
    save(job)
    names = sorted(path.name for path in job.directory.iterdir())
    assert len(names) == 3 and names[:2] == ["manifest.json", "notes.txt"] and re.match("save-1-", names[2])


def test_a_directory_with_a_checkpoint_of_another_format_is_left_alone(job):
    job.directory.mkdir()
    (job.directory / "manifest.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ValueError, match="has format 1, this version reads 2"):
        job.checkpointer.save()
    assert [path.name for path in job.directory.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("name", ["a b", "..", ".", "%2e", "Küche", "x.rows-0"])
def test_tables_may_have_any_name(name, tmp_path):
    table = DictTable(name, "x")
    table.train(name, [1, 2], np.random.default_rng(0))
    simulated.save(tmp_path, [table])
    read = DictTable("x", name)
    simulated.load(tmp_path, [read])
    assert contents([read]) == contents([table])
