"""benchmarks.schedule_quality without training: its settings, the variants that it trains, and its figures."""

import gzip
import json
import subprocess

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.schedule_quality import __main__ as benchmark
from models.experiment import load
from tf_fusedrec import Topology

USERS = 40


class Trainer:
    """Replaces the training processes: records their commands and writes the files of models.train."""

    def __init__(self, fails=False):
        self.commands = []
        self.fails = fails

    def __call__(self, command, **_):
        self.commands.append(command)
        folder = benchmark.pathlib.Path(command[command.index("--output") + 1])
        if not self.fails:
            # semi_async ranks the target one place lower for every second user.
            lower = np.arange(USERS) % 2 if folder.name == "semi_async" else 0
            np.savez(folder / "samples.npz", user=np.arange(USERS), rank=np.full(USERS, 10) + lower)
            test = {"users": USERS, "baseline_hr@10": 0.1, "baseline_ndcg@10": 0.05}
            (folder / "results.json").write_text(json.dumps({"test": test}), encoding="utf-8")
        return subprocess.CompletedProcess(command, int(self.fails))


@pytest.fixture
def data(tmp_path):
    lines = [f"{user},{movie},3,{1000 * user + movie}" for user in range(1, 6) for movie in range(1, 5)]
    (tmp_path / "ml").mkdir()
    with gzip.open(tmp_path / "ml/ratings.csv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(["user_id,movie_id,rating,timestamp", *lines]) + "\n")
    return tmp_path / "ml"


def test_variants_are_what_they_are_called():
    experiments = {name: load(benchmark.CONFIG, settings) for name, settings in benchmark.VARIANTS.items()}
    assert {name: one.train.schedule for name, one in experiments.items() if one.train.schedule != "sync"} == {
        "nested_M4": "nested(4)",
        "semi_async": "semi_async",
    }
    assert {name: one.embedding.topology for name, one in experiments.items() if one.embedding.groups > 1} == {
        "weight_sync_c1": Topology(2, "weight_sync", moment_scale=1.0),
        "weight_sync_c2": Topology(2, "weight_sync", moment_scale=2.0),
    }
    assert {name: one.seed for name, one in experiments.items() if one.seed} == {"sync_seed_1": 1}


def test_every_variant_is_trained_once_and_compared_with_sync(data, tmp_path, monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(benchmark.processes, "run", trainer)
    monkeypatch.setattr(harness, "_commit", lambda: "")  # it would run git as a process
    given = ["--data", str(data), "--run", str(tmp_path / "run"), "--epochs", "2", "--json", str(tmp_path / "r.json")]
    benchmark.main([*given, "--arms", "semi_async"])
    some = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [row["arm"] for row in some["arms"]] == ["sync", "semi_async"] and "nested_M4" in some["not_trained"]
    benchmark.main(given)
    assert len(trainer.commands) == len(benchmark.VARIANTS)
    assert "train.epochs=2" in trainer.commands[0]
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [row["arm"] for row in result["arms"]] == list(benchmark.VARIANTS) and not result["not_trained"]
    assert (result["epochs"], result["users"], result["ranks"]) == (2, USERS, 2)
    rows = {row["arm"]: row for row in result["arms"]}
    assert rows["sync"]["hr_at_10"] == 1 and rows["semi_async"]["hr_at_10"] == 0.5
    assert rows["semi_async"]["hr_at_10_difference"] == -0.5
    assert -0.8 < rows["semi_async"]["hr_at_10_low"] < -0.5 < rows["semi_async"]["hr_at_10_high"] < -0.2
    assert rows["nested_M4"]["ndcg_at_10_low"] == rows["nested_M4"]["ndcg_at_10_high"] == 0
    # A finished variant is not trained again, and other settings refuse its folder.
    benchmark.main(given)
    assert len(trainer.commands) == len(benchmark.VARIANTS)
    with pytest.raises(harness.CheckFailed, match="belongs to other settings .* Name another --run"):
        benchmark.main([*given, "--epochs", "3"])


def test_quick_takes_the_first_users(data, tmp_path):
    folder = benchmark.first_users(data, tmp_path / "few", 2)
    lines = (folder / "ratings.csv").read_text(encoding="utf-8").split()
    assert len(lines) == 1 + 2 * 4 and lines[-1].startswith("2,4,")


def test_a_variant_that_fails_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.processes, "run", Trainer(fails=True))
    with pytest.raises(harness.CheckFailed, match="sync ended with code 1; see .*log.txt"):
        benchmark.train(tmp_path / "sync", ["train.epochs=1"])


def test_without_data_nothing_is_measured(tmp_path, capsys):
    benchmark.main(["--data", str(tmp_path / "none"), "--json", str(tmp_path / "r.json")])
    assert "not measured" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["arms"] == []
