"""Data are prepared once, and again when the input changes; wrong data are refused by name.

One job at a time writes an output folder.
"""

import dataclasses
import shutil
import threading

import pytest

from tf_fusedrec.models import data_cache, data_profile, train
from tf_fusedrec.models.data_profile import profile_of
from tf_fusedrec.models.data_sets.layouts import read_info
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.experiment.data_config import DataConfig
from tf_fusedrec.models.prepare import prepare_data
from tf_fusedrec.models.run_folder import claim

RATINGS = "user_id,movie_id,rating,timestamp\n1,10,5,100\n1,20,3,200\n2,10,4,150\n2,30,4,250\n"


def written(folder, ratings=RATINGS):
    folder.mkdir(exist_ok=True)
    (folder / "ratings.csv").write_text(ratings, encoding="utf-8")
    return folder


def movielens(source):
    data = {"source": "movielens", "input": str(source), "held_out": "test"}
    return from_dict({"name": "x", "task": "retrieval", "data": data})


def test_unchanged_input_is_used_again_and_changed_input_is_not(tmp_path, monkeypatch):
    raw, root = written(tmp_path / "raw"), tmp_path / "data"
    first = prepare_data(movielens(raw), root)
    made = (first / "dataset.json").stat().st_mtime_ns
    assert prepare_data(movielens(raw), root) == first
    assert (first / "dataset.json").stat().st_mtime_ns == made
    shutil.copytree(raw, tmp_path / "copy", copy_function=shutil.copyfile)  # files with other times
    assert prepare_data(movielens(tmp_path / "copy"), root) == first
    with monkeypatch.context() as patched:
        patched.setattr(data_cache, "_digest", lambda path: pytest.fail(f"{path} was read again"))
        assert prepare_data(movielens(raw), root) == prepare_data(movielens(tmp_path / "copy"), root) == first
    written(raw, RATINGS.replace(",5,", ",1,"))  # of the same size
    assert prepare_data(movielens(raw), root) != first
    written(raw, RATINGS + "2,20,1,300\n")
    second = prepare_data(movielens(raw), root)
    assert second != first
    info = read_info(second)
    assert (info.users, info.items) == (2, 3)


def test_a_file_of_sequences(tmp_path):
    (tmp_path / "seq.txt").write_text("1 2 3 4\n", encoding="utf-8")
    fields = {"name": "x", "task": "retrieval", "data": {"source": "sequences", "input": str(tmp_path / "seq.txt")}}
    folder = prepare_data(from_dict(fields), tmp_path / "data")
    assert read_info(folder).users == 1 and (folder / "validation").is_dir()
    fields["data"]["held_out"] = "test"
    assert not (prepare_data(from_dict(fields), tmp_path / "data") / "validation").exists()
    assert not data_cache.clear(folder) and folder.exists()  # this process may read it
    data_cache.release(folder)
    assert data_cache.clear(folder) and not folder.exists()


def test_a_converted_folder_is_used_as_it_is(tmp_path):
    converted = prepare_data(movielens(written(tmp_path / "raw")), tmp_path / "data")
    assert prepare_data(movielens(converted), tmp_path / "unused") == converted
    assert not (tmp_path / "unused").exists()


def test_a_run_goes_on_with_its_kinds_of_ids_alone(tmp_path, monkeypatch):
    rows = [f"{user},A{at % 3},{1000 + at},{at % 2}" for user in (1, 2) for at in range(10)]
    (tmp_path / "a.csv").write_text("u,sku,t,y\n" + "\n".join(rows) + "\n", encoding="utf-8")

    def table(**kinds):
        columns = {"user": "u", "item": "sku", "time": "t", "labels": {"click": "y"}, "kinds": kinds}
        data = {"source": "table", "input": str(tmp_path / "a.csv"), "columns": columns}
        return from_dict({"name": "x", "task": "ranking", "data": data, "model": {"kind": "grm"}})

    first, other = (prepare_data(table(**kinds), tmp_path / "data") for kinds in ({"sku": "string"}, {}))
    assert [read_info(folder).id_kinds for folder in (first, other)] == [{"item": "string"}, {}]
    saved = {"experiment": table().to_dict(), "input": {"step": 3}, "id_kinds": {"item": "string"}}
    monkeypatch.setattr("tf_fusedrec.models.train.read_manifest", lambda checkpoint: {"extra": saved})
    assert train._saved_input(table(), first, tmp_path / "checkpoint") == {"step": 3}
    with pytest.raises(ValueError, match="was trained with the kinds of ids {'item': 'string'}, but .* has {}"):
        train._saved_input(table(), other, tmp_path / "checkpoint")


def test_synthetic_data_depend_on_sizes_and_seed(tmp_path):
    def folder(**changes):
        sizes = {"source": "synthetic-retrieval", "users": 20, "items": 20, "clusters": 4, "mean_history": 3}
        fields = {"name": "x", "task": "retrieval", "data": sizes, **changes}
        return prepare_data(from_dict(fields), tmp_path)

    assert folder() == folder()
    assert folder(seed=1) != folder()


def test_validation_and_test_of_movielens_as_ranking_are_two_folders(tmp_path):
    lines = [f"{user}::{10 + at % 3}::{1 + (user + at) % 5}::{100 + at}" for user in (1, 2) for at in range(20)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "movies.dat").write_text("10::A (1990)::Drama\n11::B (1991)::Drama\n12::C::\n", encoding="utf-8")

    def folder(**data):
        given = {"source": "movielens_ranking", "input": str(tmp_path), "window": 4, **data}
        return prepare_data(from_dict({"name": "x", "task": "ranking", "data": given}), tmp_path / "data")

    infos = [read_info(folder(held_out=part)) for part in ("test", "validation")]
    for info, part in zip(infos, ("test", "validation")):
        assert f"the folder test holds {part}" in info.split and "windows of 4 exposures" in info.split
    assert folder(window=3) != folder()
    with pytest.raises(ValueError, match="data.window is 40, but model.max_exposures is 32, so a row would lose expo"):
        folder(window=40)


def test_refusals(tmp_path):
    ranking = from_dict({"name": "x", "task": "ranking", "data": {"source": "synthetic-ranking"}})

    def with_data(**data):
        return dataclasses.replace(ranking, data=DataConfig(**data))

    with pytest.raises(ValueError, match="data.source 'kuairand' needs its files: name their folder with --data"):
        prepare_data(with_data(source="kuairand"), tmp_path)
    with pytest.raises(ValueError, match="which does not exist"):
        prepare_data(with_data(source="kuairand", input=str(tmp_path / "nothing")), tmp_path)
    raw = written(tmp_path / "raw")
    with pytest.raises(ValueError, match="is not in our Parquet layout .* there are converters for"):
        prepare_data(with_data(source="synthetic-ranking", input=str(raw)), tmp_path)
    converted = prepare_data(movielens(raw), tmp_path / "data")
    with pytest.raises(ValueError, match="holds retrieval data, but the experiment's task is 'ranking'"):
        prepare_data(with_data(source="kuairand", input=str(converted)), tmp_path)
    with pytest.raises(ValueError, match="data cannot be prepared in .*/ratings.csv: .*: '.*'. Set data.cache"):
        prepare_data(movielens(raw), raw / "ratings.csv")


def test_a_folder_is_for_one_job_at_a_time_and_must_be_writable(tmp_path):
    first = claim(tmp_path / "run")
    with pytest.raises(ValueError, match="another job writes to '.*/run'. Wait for its end, or pass another --output"):
        claim(tmp_path / "run")
    first.close()
    claim(tmp_path / "run").close()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output '.*/file/run' cannot be written: .*Pass another --output"):
        claim(tmp_path / "file/run")


def test_the_profile_has_events_times_label_rates_and_gaps_of_every_split(tmp_path, monkeypatch):
    lines = [f"{user},{item},{1000 + at},{at % 2},{at or ''}" for user in (1, 2) for item, at in enumerate(range(10))]
    (tmp_path / "a.csv").write_text("u,i,t,y,price\n" + "\n".join(lines) + "\n", encoding="utf-8")
    columns = {"user": "u", "item": "i", "time": "t", "labels": {"click": "y"}, "numbers": ["price"]}
    data = {"source": "table", "input": str(tmp_path / "a.csv"), "columns": columns}
    model = {"conversion_label": "exposed_click", "exposed_dense": ["price"]}
    experiment = from_dict({"name": "x", "task": "ranking", "data": data, "model": model})
    folder = prepare_data(experiment, tmp_path / "data")
    profile = profile_of(experiment, folder)
    assert (profile["users"], profile["items"]) == (2, 10)
    common = {"users": 2, "missing": {}}
    assert profile["splits"] == {
        "train": {
            "rows": 2, "users": 2, "events": 16, "first": 1000, "last": 1007, "labels": {"click": 0.5},
            "missing": {"price": 0.125},
        },
        "validation": {**common, "rows": 2, "events": 2, "first": 1008, "last": 1008, "labels": {"click": 0.0}},
        "test": {**common, "rows": 2, "events": 2, "first": 1009, "last": 1009, "labels": {"click": 1.0}},
    }  # fmt: skip
    (folder / "train" / "half-written.parquet").write_bytes(b"PAR1")
    growing = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, input=str(folder), follow=True))
    assert [*profile_of(growing, folder)["splits"]] == ["validation", "test"]
    (folder / "train" / "half-written.parquet").unlink()
    monkeypatch.setattr(data_profile, "_split", None)  # the next run reads profile.json
    assert profile_of(experiment, folder) == profile


def test_one_job_at_a_time_converts_data_that_another_one_then_uses(tmp_path, capsys):
    folder = tmp_path / "cache" / "table-1"
    folder.parent.mkdir()
    with data_cache.locked(folder):
        waiting = threading.Thread(target=lambda: data_cache.locked(folder).__enter__(), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and "waiting for another job that converts table-1" in capsys.readouterr().out
    waiting.join(10)
    assert not waiting.is_alive()
