"""benchmarks.schedule_quality without training: its variants, its jobs, its figures, the splits and the proposition."""

import gzip
import json

import numpy as np
import pytest

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.training import content_of
from benchmarks.schedule_quality import __main__ as benchmark
from benchmarks.schedule_quality import job, splits
from models.experiment import from_dict
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder, read_items
from tf_fusedrec.data.converters.movielens import convert_movielens
from tf_fusedrec.data.rows import concat

USERS = 40


@pytest.fixture
def data(tmp_path):
    lines = [f"{user},{movie},3,{1000 * user + movie}" for user in range(1, 6) for movie in range(1, 5)]
    (tmp_path / "ml").mkdir()
    with gzip.open(tmp_path / "ml/ratings.csv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(["user_id,movie_id,rating,timestamp", *lines]) + "\n")
    return tmp_path / "ml"


class Trainer:
    """Replaces the ranks: records the jobs and writes the files of job.on_rank."""

    def __init__(self):
        self.folders = []

    def __call__(self, function, ranks, *, folder, experiment, **_):
        assert (function, ranks) == (job.on_rank, 4)
        place = benchmark.pathlib.Path(folder)
        self.folders.append(place)
        config = from_dict(experiment)
        # semi_async ranks the target one place lower for every second user, with both seeds.
        lower = np.arange(USERS) % 2 if config.train.schedule == "semi_async" else 0
        samples = {"user": np.arange(USERS), "rank": np.full(USERS, 10) + lower, "entropy": np.full(USERS, 3.0)}
        np.savez(place / "samples.npz", **samples, baseline_entropy=np.full(USERS, 4.0))
        groups = config.embedding.groups
        hit = 1 - float(np.mean(lower))
        test = {"hr@10": hit, "ndcg@10": hit / np.log2(11), "ne": 0.75}
        curve = [{"epoch": n + 1, "moment": (n + 1) * (1.0 + 2.0 * groups), "test": test} for n in range(3)]
        (place / "curve.json").write_text(json.dumps(curve), encoding="utf-8")
        (place / "result.json").write_text(json.dumps({**curve[2], "commit": "abc"}), encoding="utf-8")


def test_jobs_are_trained_once_and_compared_with_sync_of_the_same_seeds(data, tmp_path, monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(benchmark.processes, "ask_ranks", trainer)
    monkeypatch.setattr(harness, "commit", lambda: "")  # it would run git as a process
    monkeypatch.setattr(benchmark, "RESAMPLES", 2)
    given = ["--data", str(data), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]

    def result():
        return json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))

    benchmark.main([*given, "--variants", "sync", "semi_async", "--seeds", "1"])
    some = result()
    assert {variant: row["seeds"] for variant, row in some["variants"].items()} == {"sync": [1], "semi_async": [1]}
    assert (
        len(some["missing"]) == 14 and "semi_async seed 2" in some["missing"] and "sync seed 1" not in some["missing"]
    )
    assert "expected_4" not in some["growth"][0]
    benchmark.main([*given, "--variants", "semi_async", "--seeds", "2"])
    row = result()["variants"]["semi_async"]
    assert row["seeds"] == [1, 2] and row["hr_at_10"] == 0.5
    assert row["pairs"] == [1], "sync has no second seed yet"
    benchmark.main(given)
    assert len(trainer.folders) == len(set(trainer.folders)) == 16
    monkeypatch.setattr(benchmark, "RESAMPLES", 200)
    benchmark.main(given)
    assert len(trainer.folders) == 16, "a finished job is not trained again"
    every = result()
    rows = every["variants"]
    assert list(rows) == list(benchmark.VARIANTS) and not every["missing"] and every["users"] == USERS
    assert rows["sync"]["hr_at_10"] == 1 and rows["semi_async"]["hr_at_10_difference"] == -0.5
    # Both seeds lose the same users, so a draw of users loses as many with two seeds as with one. If samples were drawn
    # instead of users, the interval would be shorter by 1 / sqrt(2). 200 draws give its ends to a tenth.
    half = 1.96 * 0.5 / np.sqrt(USERS)
    assert rows["semi_async"]["hr_at_10_low"] == pytest.approx(-0.5 - half, abs=0.2 * half)
    assert rows["semi_async"]["hr_at_10_high"] == pytest.approx(-0.5 + half, abs=0.2 * half)
    assert (rows["nested_M4"]["ne"], rows["nested_M4"]["ne_low"], rows["nested_M4"]["ne_high"]) == (0.75, 0, 0)
    assert every["growth"][1] == {
        "epoch": 2, "measured_1": 6.0, "measured_2": 10.0, "measured_4": 18.0, "expected_4": 18.0,
    }  # fmt: skip
    # Another size has folders of its own, and its figures do not mix with those of the first.
    monkeypatch.setattr(benchmark, "EPOCHS", 7)
    benchmark.main([*given, "--variants", "sync", "--seeds", "1"])
    assert len(trainer.folders) == 17 and len(result()["missing"]) == 15


def test_validation_holds_out_the_item_before_the_last(data, tmp_path):
    convert_movielens(data, tmp_path / "whole")
    few = splits.first_users(tmp_path / "whole", tmp_path / "few", 2)
    validation = splits.validation_of(few, tmp_path / "validation")
    convert_movielens(data, tmp_path / "copy")
    again = splits.validation_of(
        splits.first_users(tmp_path / "copy", tmp_path / "few_2", 2), tmp_path / "validation_2"
    )
    assert content_of(again) == content_of(validation), (
        "a file has the name of a folder, so that jobs are not found again"
    )
    columns = [Column("user_id"), Column("item_id", ragged=True), Column("target_item"), Column("target_timestamp")]
    for folder, history, target in ((few, [1, 2, 3], 4), (validation, [1, 2], 3)):
        rows = concat(list(ParquetFolder(folder / "test", columns).read()))
        assert rows.columns["user_id"].tolist() == [1, 2]
        assert rows.ragged("item_id").values.tolist() == history * 2
        assert rows.columns["target_item"].tolist() == [target] * 2
        assert rows.columns["target_timestamp"].tolist() == [1000 + target, 2000 + target]
        assert read_items(folder)[0].tolist() == [1, 2, 3, 4], "the catalogue is that of the whole log"
    train = concat(list(ParquetFolder(validation / "train", columns[:2]).read()))
    assert train.ragged("item_id").values.tolist() == [1, 2, 1, 2]


def test_training_stops_after_epochs_without_a_better_validation():
    def curve(*values):
        return [{"epoch": n + 1, "validation": {"ndcg@10": value}} for n, value in enumerate(values)]

    assert not job.ended([], patience=2, epochs=9)
    assert not job.ended(curve(0.1, 0.3, 0.2), patience=2, epochs=9)
    assert job.ended(curve(0.1, 0.3, 0.2, 0.3), patience=2, epochs=9), "an equal validation is not a better one"
    assert job.best(curve(0.1, 0.3, 0.2, 0.3))["epoch"] == 2
    assert not job.ended(curve(0.1, 0.3, 0.2, 0.4), patience=2, epochs=9)
    assert job.ended(curve(0.1, 0.3, 0.4), patience=2, epochs=3)


def test_moments_of_groups_grow_as_the_proposition_says():
    """Algorithm 1 of 2D-SP in NumPy: 8 ranks with i.i.d. gradients, in 1, 2 and 4 groups, over 4,000 steps."""
    rng = np.random.default_rng(0)
    signal, noise = 0.3, 1.0
    gradients = signal + noise * rng.standard_normal([4000, 8, 5])  # steps, ranks, columns

    def accumulated(groups):
        of_group = gradients.reshape(4000, groups, 8 // groups, 5).mean(axis=2)
        local = np.sum(of_group**2, axis=2)  # line 5, for each group
        return np.cumsum(local.mean(axis=1)), local  # line 10: the mean over groups

    measured = {groups: accumulated(groups)[0] for groups in (1, 2, 4)}
    expected = benchmark.expected_moment(4, measured[1], measured[2])
    # Every step adds 5 (signal^2 + M noise^2 / 8); the sum of 4,000 independent steps is within a few percent of it.
    for groups, curve in measured.items():
        assert curve[-1] == pytest.approx(4000 * 5 * (signal**2 + groups * noise**2 / 8), rel=0.05)
    assert measured[4][-1] == pytest.approx(expected[-1], rel=0.05)
    # The lower bound holds for any gradients, by Jensen's inequality; the upper one is of expectations.
    assert np.all(measured[1] < measured[2]) and np.all(measured[2] < measured[4])
    assert measured[4][-1] < 4 * measured[1][-1]
    local = accumulated(4)[1].mean(axis=0)
    assert local == pytest.approx(local.mean(), rel=0.05), "the expectation is equal in all groups"


def test_the_mean_moment_is_that_of_the_rows():
    embedding = fr.FusedEmbedding(
        tables=[fr.TableConfig("item", 2, fr.optimizers.RowWiseAdagrad(0.1, variant="2d_sp"))],
        features=[fr.FeatureConfig("items", "item", combiner="sum")],
    )
    ids = tf.ragged.constant([[1], [2], [1]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding({"items": ids}, training=True)["items"] * [3.0, 4.0])
    tape.gradient(loss, embedding.trainable_variables)
    # The gradient of a row is (3, 4) for each of its uses: 25 for id 2, and 4 * 25 for id 1, used twice.
    assert job.mean_moment(embedding) == pytest.approx((25.0 + 100.0) / 2)
