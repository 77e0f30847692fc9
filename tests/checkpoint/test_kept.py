"""Earlier saves stay and can be loaded. Other folders and files in the same place stay untouched."""

import pytest

from tests.checkpoint.job import Job, save
from tests.checkpoint.tables import embedding_of
from tests.checkpoint.test_callback import fit, model, table
from tf_fusedrec import callbacks, checkpoint
from tf_fusedrec.checkpoint.loading import dense_prefix, read_tables
from tf_fusedrec.files import manifest
from tf_fusedrec.files.saves import read_manifest


@pytest.mark.slow
@pytest.mark.parametrize(("full_every", "parts"), [(1, [1] * 8), (3, [1, 2, 2, 1, 2, 2, 1, 2])])
def test_the_last_saves_stay_and_each_is_what_it_was(full_every, parts, tmp_path):
    job, states = Job(tmp_path / "c", full_every=full_every, keep=3), []
    for step in range(8):
        job.train()
        job.table.remove("item", list(job.table.rows["rows"]["item"])[:3])
        save(job, step)
        states.append(job.state())
        there = checkpoint.saves(job.directory)
        assert len(read_manifest(job.directory)["tables"]["item"]["parts"]) == parts[step]
        # A full save stays as long as a kept delta needs it.
        kept = [read_manifest(job.directory, save) for save in there[-3:]]
        assert set(there) == set().union(*map(manifest.saves_of, kept)) and len(kept) == min(step + 1, 3)
        for n, name in enumerate(there[-3:], len(states) - len(there[-3:])):
            assert job.loaded(name) == job.loaded(n + 1) == (n, states[n])
            assert read_manifest(job.directory, name)["extra"] == n
            assert len(read_tables(job.directory, n + 1)["item"][0]) == len(states[n][0]["rows", "item"])
    assert job.loaded() == (7, states[7])
    assert dense_prefix(job.directory, there[-2]) == str(job.directory / there[-2] / "dense")


def test_a_save_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    job = Job(tmp_path / "c")
    save(job)
    (there,) = checkpoint.saves(job.directory)
    for which, words in (("best", "in"), *((which, "one of the saves in") for which in (2, "save-1-00000000", "../c"))):
        with pytest.raises(ValueError, match=rf"save {which!r} is not {words} .*/c, which holds \['{there}'\]"):
            job.loaded(which)
    assert checkpoint.saves(tmp_path / "nothing") == []


def test_an_earlier_save_is_loaded_when_the_last_manifest_is_damaged(tmp_path):
    job = Job(tmp_path / "c")
    save(job, 1)
    state = job.state()
    job.train()
    save(job, 2)
    (job.directory / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="manifest.json has format None"):
        job.loaded()
    assert job.loaded(1) == (1, state)


def test_the_callback_keeps_and_restores_an_earlier_save(tmp_path):
    saves = callbacks.Checkpoint(tmp_path, 5, {}, keep=3, layers=[embedding_of(table())])
    fit(model(), [saves], 4, 5)
    resumed = callbacks.Checkpoint(tmp_path, 5, {}, layers=[embedding_of(table())])
    assert [resumed.load(model(), save) for save in (2, 3, None)] == [(2, 0), (3, 0), (4, 0)]
    checkpoint.save(tmp_path / "other", model(), layers=[embedding_of(table())], extra=[1])
    other = callbacks.Checkpoint(tmp_path / "other", 5, {}, layers=[embedding_of(table())])
    with pytest.raises(ValueError, match=r"is \[1\], want the epoch and step to resume from: callbacks.Checkpoint "):
        other.load(model())


def users_own(directory):
    """Makes files and folders of a user, with names or contents like ours."""
    directory.mkdir()
    (directory / "save-notes.txt").write_text("mine", encoding="utf-8")
    (directory / "save-").write_text("mine", encoding="utf-8")
    (directory / "save-7-0123abcd").write_text("a file", encoding="utf-8")
    for name in ("save-2024-important", "save-x-0123abcd", "save-8-0123abcd", "save-9-0123abcd.partial", "mine"):
        (directory / name).mkdir()
        (directory / name / "notes.txt").write_text("mine", encoding="utf-8")
    (directory / "save-3-0123abcd").mkdir()  # an empty one
    (directory / "save-2024-important" / "item.rows-0.shard").write_bytes(b"a copy of one of ours")
    (directory / "save-9-0123abcd.partial" / "item.rows-0.shard").write_bytes(b"a copy of one of ours")
    (directory / "save-6-0123abcd").symlink_to(directory / "mine")
    return sorted(path.relative_to(directory) for path in directory.rglob("*"))


def test_folders_and_files_of_others_stay(tmp_path):
    before = users_own(tmp_path / "c")
    job = Job(tmp_path / "c", keep=1)
    (tmp_path / "c" / "save-10-89abcdef.partial").mkdir()  # the rest of an interrupted save is removed
    (tmp_path / "c" / "save-10-89abcdef.partial" / "dense.index").write_bytes(b"x")
    for step in range(3):
        save(job, step)
    after = sorted(path.relative_to(job.directory) for path in job.directory.rglob("*"))
    (there,) = checkpoint.saves(job.directory)
    assert set(before) <= set(after)
    assert there.startswith("save-12-")  # the first save, 10, had removed the rest of an interrupted one
    extra = {path.parts[0] for path in set(after) - set(before)}
    assert extra == {"manifest.json", there} and job.loaded()[0] == 2


def test_a_save_of_ours_that_somebody_added_to_stays_whole(tmp_path):
    job = Job(tmp_path / "c", keep=1)
    save(job, "first")
    state = job.state()
    (first,) = checkpoint.saves(job.directory)
    (job.directory / first / "why.txt").write_text("the best one", encoding="utf-8")
    for step in range(3):
        job.train()
        save(job, step)
    assert job.loaded(first) == ("first", state) and len(checkpoint.saves(job.directory)) == 2


def test_folders_and_files_in_the_wrong_place_are_named(tmp_path):
    job = Job(tmp_path / "c", background=False)
    save(job, 1)
    (there,) = checkpoint.saves(job.directory)
    for name in ("item.rows-0.shard", "dense.index"):
        path = job.directory / there / name
        path.rename(tmp_path / "aside")
        path.mkdir()
        with pytest.raises(ValueError, match=f"Checkpoint file .*{name} is a folder instead of a file"):
            job.loaded()
        path.rmdir()
        (tmp_path / "aside").rename(path)
    (job.directory / "manifest.json").rename(tmp_path / "manifest.json")
    (job.directory / "manifest.json").mkdir()
    for call in (lambda: job.loaded(), lambda: save(job, 2)):
        with pytest.raises(ValueError, match="manifest.json is a folder instead of a file"):
            call()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(NotADirectoryError, match="folder must be a folder, but .*/file is a file. Use another path."):
        save(Job(tmp_path / "file", background=False))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "x"
