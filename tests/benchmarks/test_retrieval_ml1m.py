"""benchmarks.retrieval_ml1m on a small data set: a run, its resumption, curve and JSON, flags, refusals."""

import json

import numpy as np
import pytest

from benchmarks.retrieval_ml1m import __main__ as benchmark
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged, Rows, concat

USERS, ITEMS = 150, 40  # two batches


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ml")
    generator = np.random.default_rng(0)
    lines = ["user_id,movie_id,rating,timestamp"]
    for user in range(1, USERS + 1):
        for place, movie in enumerate(generator.choice(ITEMS, 6, replace=False) + 1):
            lines.append(f"{user},{movie},3,{10**9 + 60 * place}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def arguments(data, run, *more):
    return ["--data", str(data), "--run", str(run), *more]


@pytest.mark.nightly
def test_a_run_goes_on_where_it_ended_and_tells_how_far_it_came(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "EVALUATE_EVERY", 1)
    output = tmp_path / "result.json"
    given = arguments(data, tmp_path / "run", "--quick", "--json", str(output))

    save = benchmark.callbacks.Checkpoint._save

    def save_and_stop(self, **given):
        save(self, **given)
        self.on_train_end()  # the file is written in the background
        raise KeyboardInterrupt

    # A run that stops after the first epoch leaves its figures in the JSON, marked as incomplete.
    monkeypatch.setattr(benchmark.callbacks.Checkpoint, "_save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(given)
    first = json.loads(output.read_text(encoding="utf-8"))
    assert (first["epochs"], first["complete"]) == (1, False)
    monkeypatch.setattr(benchmark.callbacks.Checkpoint, "_save", save)
    benchmark.main(given)
    assert "epochs done: 1" in capsys.readouterr().out
    result = json.loads(output.read_text(encoding="utf-8"))
    assert (result["epochs"], result["complete"], result["users"]) == (2, True, USERS)
    for name in ("hr_at_10", "ndcg_at_10", "hr_at_50", "hr_at_200"):
        assert 0 <= result[name] <= 1
    assert result["hr_at_50"] == 1.0  # of 40 movies
    assert result["seconds_per_epoch"] > 0 and "estimates" in result["note"]
    assert result["best_on_test"]["ndcg_at_10"] >= result["ndcg_at_10"]
    entries = json.loads((tmp_path / "run" / "curve.json").read_text(encoding="utf-8"))
    assert [entry["epoch"] for entry in entries] == [1, 2] and entries[0]["loss"] > 0
    # A finished run trains nothing and writes the same JSON again.
    output.unlink()
    benchmark.main(given)
    again = json.loads(output.read_text(encoding="utf-8"))
    assert {**again, "load_average": 0} == {**result, "load_average": 0}


@pytest.mark.nightly
def test_validation_chooses_the_epoch_and_is_not_trained_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "EVALUATE_EVERY", 1)
    output = tmp_path / "result.json"
    benchmark.main(arguments(data, tmp_path / "run", "--quick", "--validation", "--json", str(output)))
    result = json.loads(output.read_text(encoding="utf-8"))
    entries = json.loads((tmp_path / "run" / "curve.json").read_text(encoding="utf-8"))
    best = max(entries, key=lambda entry: entry["validation"]["ndcg_at_10"])
    assert (result["validation"], result["best_epoch"]) == (True, best["epoch"])
    assert result["hr_at_10"] == best["hr_at_10"] != best["validation"]["hr_at_10"]
    items = ParquetFolder(tmp_path / "run/data/validation/train", (Column("item_id", ragged=True),))
    lengths = concat(list(items.read())).ragged("item_id").lengths()
    np.testing.assert_array_equal(lengths, np.full(USERS, 4))  # of the 6 items of a user


@pytest.mark.nightly
def test_another_model_does_not_go_on_with_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "QUICK_EPOCHS", 1)
    given = arguments(data, tmp_path / "run", "--quick")
    benchmark.main(given)
    with pytest.raises(SystemExit, match="belongs to another experiment.* Name another folder"):
        benchmark.main([*given, "--model", "sasrec"])


@pytest.mark.parametrize(
    ("flags", "encoder", "position", "encoding"),
    [
        ([], "hstu", True, "buckets"),
        (["--model", "sasrec"], "sasrec", True, "buckets"),
        (["--model", "hstu_large"], "hstu", True, "buckets"),
    ],
)
def test_flags_choose_the_model(flags, encoder, position, encoding):
    experiment = benchmark.experiment_of(benchmark.parse(arguments("x", "y", *flags)))
    model = experiment.model
    assert (model.encoder, model.position_bias, model.time_encoding) == (encoder, position, encoding)
    assert (experiment.train.epochs, model.max_sequence_length, model.num_negatives) == (101, 211, 128)


def test_every_user_comes_once_an_epoch_in_an_order_of_its_own():
    splits = np.arange(301, dtype=np.int64)
    rows = Rows({"item_id": Ragged(np.arange(300), splits)}, 300)
    epochs = [[], []]
    for number, batch in enumerate(benchmark.user_batches(rows, 7, 0, 2)):
        epochs[number // 3].append(batch["item_id"].values.numpy())
    assert [len(batch) for batch in epochs[0]] == [128, 128, 44]
    first, second = (np.concatenate(epoch) for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(300)) and (first != second).any()
    again = np.concatenate([batch["item_id"].values for batch in benchmark.user_batches(rows, 7, 1, 2)])
    np.testing.assert_array_equal(again, second)  # a resumed run has the order of an uninterrupted one
