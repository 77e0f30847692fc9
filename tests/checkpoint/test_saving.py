"""Saves: one at a time, in the background, full or delta; the order of ranks, and the place where errors surface."""

import json
import threading

import numpy as np
import pytest

from tests.checkpoint import simulated
from tests.checkpoint.job import Job, Nth, model, save, trained
from tests.checkpoint.tables import DictTable, contents, embedding_of, ranks_of
from tf_fusedrec import checkpoint
from tf_fusedrec.checkpoint import saving
from tf_fusedrec.files import disk
from tf_fusedrec.files.manifest import exists
from tf_fusedrec.files.saves import read_manifest


@pytest.fixture(params=[False, True], ids=["foreground", "background"])
def job(request, tmp_path):
    return Job(tmp_path / "c", background=request.param)


@pytest.mark.parametrize(
    ("fails", "timeout_s", "words"),
    [
        (True, 60, "could not write its part of {}. OSError: .* No space left"),  # at once
        (False, 0.05, "has not written its part of {} in time; the last checkpoint stays. Check that"),
    ],
)
def test_a_rank_that_has_failed_or_is_silent_is_named(fails, timeout_s, words, tmp_path):
    plan = saving.make_plan(tmp_path, 3, None, {})
    for rank in (0, 2):
        saving.write_shard(tmp_path, plan, saving.copy_tables([DictTable("item")], plan, rank), rank)
    if fails:
        saving.give_up(tmp_path, plan, 1, OSError(28, "No space left on device"))
    with pytest.raises(RuntimeError, match=f"Rank 1 {words.format(plan.save)}"):
        saving.commit(tmp_path, plan, simulated.DENSE, None, timeout_s=timeout_s)
    assert not exists(tmp_path)


def test_ranks_may_be_late(tmp_path):
    """Rank 0 waits for the other ranks, in any order."""
    plan = saving.make_plan(tmp_path, 3, None, {})
    tables = ranks_of(lambda: DictTable("item"), 3, trained)

    def others():
        for rank in (2, 1, 0):
            saving.write_shard(tmp_path, plan, saving.copy_tables([tables[rank]], plan, rank), rank)

    thread = threading.Timer(0.1, others)
    thread.start()
    saving.commit(tmp_path, plan, simulated.DENSE, None, timeout_s=20)
    read = ranks_of(lambda: DictTable("item"), 2)
    simulated.load(tmp_path, read)
    assert contents(read) == contents(tables)


@pytest.fixture
def gate(monkeypatch):
    """Returns an event that blocks all writes of shards until it is set."""
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
    assert not exists(job.directory)
    gate.set()
    job.checkpointer.wait()
    assert job.loaded() == ({"step": [1]}, at_save)


def test_one_save_is_written_at_a_time(tmp_path, gate):
    job = Job(tmp_path / "c")
    job.checkpointer.save(1)
    job.train()
    threading.Timer(0.2, gate.set).start()
    job.checkpointer.save(2)  # returns once the first save is complete and the second is copied
    assert gate.is_set() and read_manifest(job.directory)["extra"] in (1, 2)
    job.checkpointer.wait()
    assert job.loaded() == (2, job.state())


def test_a_background_failure_surfaces_once_at_the_next_save_or_wait(tmp_path, monkeypatch):
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
        assert len(read_manifest(job.directory)["tables"]["item"]["parts"]) == 1, "the next save is full"
        assert job.loaded() == (4, job.state())


@pytest.mark.parametrize(("full_every", "kept"), [(1, True), (2, False)])
def test_a_full_save_begins_a_new_record_of_tombstones_if_deltas_go_with_it(full_every, kept, tmp_path):
    job = Job(tmp_path / "c", full_every=full_every)
    job.table.remove("item", list(job.table.rows["rows"]["item"])[:3])
    save(job)
    assert bool(job.table.tombstones("item").size) == kept  # without deltas, the record is the user's


@pytest.mark.parametrize(
    ("changes", "tombstones", "options", "words"),
    [
        (False, True, {"full_every": 2}, r"1 for tables \['item'\], got 2: .* does not track changed rows"),
        (True, False, {"full_every": 2}, "removed rows would come back .* Set record_tombstones=True"),
        (True, True, {"full_every": 0}, "full_every must be >= 1, got 0"),
        (True, True, {"keep": 0}, "keep must be >= 1, got 0"),
        (True, True, {"not_finite": "never"}, r"one of \('refuse', 'skip', 'save'\), got 'never'"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, tombstones, options, words, tmp_path):
    table = DictTable("item", changes=changes)
    table.records_tombstones = tombstones
    with pytest.raises(ValueError, match=words):
        checkpoint.Checkpointer(tmp_path, model(), layers=[embedding_of(table)], **options)


def test_a_delta_without_its_full_save_is_refused(tmp_path):
    job, other = Job(tmp_path / "c", full_every=5), Job(tmp_path / "c")
    save(job)
    save(other)
    with pytest.raises(ValueError, match="no longer holds the full save save-1-[0-9a-f]+ .* its own folder"):
        job.checkpointer.save()


def test_extra_that_json_does_not_know_is_refused_before_anything_is_written(job):
    save(job, "old")
    with pytest.raises(TypeError, match="not JSON serializable"):
        job.checkpointer.save({1, 2})
    assert job.loaded()[0] == "old" and not list(job.directory.glob("*.partial"))


def test_a_directory_with_a_checkpoint_of_another_format_is_left_alone(job):
    job.directory.mkdir()
    (job.directory / "manifest.json").write_text(json.dumps({"format": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="has format 1, but this version reads 2"):
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
