"""benchmarks.ranking_kuairand on a small log: its splits, its choice of settings, and the fields of the JSON."""

import json

import numpy as np
import pytest

from benchmarks.ranking_kuairand import __main__ as benchmark
from models.evaluate import Evaluation
from tests.data.shards import read_lists
from tf_fusedrec.data import Column
from tf_fusedrec.data.kuairand import convert_kuairand

LABELS = ("is_click", "long_view", "is_profile_enter", "is_comment")
USERS, IMPRESSIONS = 12, 21


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    generator = np.random.default_rng(0)
    lines = [",".join(["user_id", "video_id", "time_ms", "duration_ms", *LABELS])]
    for user in range(USERS):
        for time in generator.permutation(IMPRESSIONS):
            labels = generator.integers(0, 2, len(LABELS))
            lines.append(",".join(map(str, [user, generator.integers(30), 1000 * time, 5000, *labels])))
    (folder / "log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    features = ["user_id,user_active_degree,register_days_range", *(f"{user},full,a" for user in range(USERS))]
    (folder / "user_features.csv").write_text("\n".join(features) + "\n", encoding="utf-8")
    return folder


def _times(folder, part):
    """Returns the sorted times of the exposures of a part, by user."""
    columns = [Column("user_id"), Column("exposed_time", ragged=True)]
    found: dict[int, list[int]] = {}
    for user, times in read_lists(benchmark.ParquetFolder(folder / part, columns)):
        found[user] = sorted([*found.get(user, []), *times])
    return found


def test_the_validation_split_is_the_end_of_what_is_before_the_test_split(source, tmp_path):
    benchmark.earlier_log(source, tmp_path / "earlier")
    for name, log in (("validation", tmp_path / "earlier"), ("test", source)):
        convert_kuairand(log, tmp_path / name, test_fraction=benchmark.HELD_OUT, split="user")
    for user, times in _times(tmp_path / "test", "train").items():
        assert times == list(range(17))  # 80 % of 21, rounded up
        assert _times(tmp_path / "validation", "train")[user] == times[:14]
        assert _times(tmp_path / "validation", "test")[user] == times[14:]


def test_a_model_trains_and_is_evaluated_after_every_epoch(source, tmp_path):
    convert_kuairand(source, tmp_path / "test", test_fraction=benchmark.HELD_OUT, split="user")
    experiment = benchmark.experiment_of("dlrm", {"model.dropout": 0.1}, 2, seed=3)
    assert (experiment.model.dropout, experiment.train.epochs, experiment.seed) == (0.1, 2, 3)
    first, second = benchmark.epochs_of(experiment, tmp_path / "test")
    assert first.results["exposures"] == USERS * 4 and first.results["loss"] != second.results["loss"]


def test_the_validation_split_alone_chooses(source, tmp_path, monkeypatch, capsys):
    generator = np.random.default_rng(1)
    runs = []

    def epochs_of(experiment, folder):
        runs.append((experiment.model.kind, folder.name, experiment.train.epochs, experiment.seed))
        for epoch in range(experiment.train.epochs):
            # 0.3 is best on the validation split after two epochs, and worst on the test split.
            good = (experiment.model.dropout == 0.3 and epoch == 1) == (folder.name == "validation")
            names = [f"{task}_{metric}" for task in ("ctr", "long_view") for metric in ("auc", "gauc")]
            results = dict.fromkeys(names, 0.8 if good else 0.6)
            results |= {f"baseline_{name}": 0.5 for name in names}
            label = np.tile([0.0, 1.0], 20)
            samples = {"user": np.repeat(np.arange(4), 10)}
            for task in ("ctr", "long_view"):
                samples |= {f"{task}_label": label, f"{task}_logit": generator.normal(size=40)}
            yield Evaluation(results, samples)

    monkeypatch.setattr(benchmark, "epochs_of", epochs_of)
    monkeypatch.setattr(benchmark, "GRID", {"model.dropout": (0.1, 0.3)})
    monkeypatch.setattr(benchmark, "EPOCHS", 3)
    monkeypatch.setattr(benchmark, "SEEDS", (0, 1))
    benchmark.main(["--data", str(source), "--json", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    for name in benchmark.MODELS:
        chosen = result[name]
        assert (chosen["setting"], chosen["epochs"], chosen["score"]) == ({"model.dropout": 0.3}, 2, 0.8)
        assert [one["scores"] for one in chosen["tried"]] == [[0.6] * 3, [0.6, 0.8, 0.6]]
        assert chosen["test"]["ctr_auc"]["seeds"] == [0.6, 0.6]
        assert [run for run in runs if run[:2] == (name, "test")] == [(name, "test", 2, seed) for seed in (0, 1)]
    assert len(result["difference"]["ctr_auc"]) == 2
    assert "mean and standard deviation of 2 seeds" in capsys.readouterr().out
