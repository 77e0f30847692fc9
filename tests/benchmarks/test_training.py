"""Trainings as jobs: the queue, resumption, choices by validation, intervals, splits, and the benchmarks that use them.

Benchmarks run with a stand-in of the queue, but for one job of each form.
"""

import json
import pathlib
import stat
import sys
import types

import numpy as np
import pytest

from benchmarks.harness import harness, processes, training
from benchmarks.quality import __main__ as quality
from benchmarks.retrieval_ml1m import __main__ as retrieval_ml1m
from tests.data.shards import read_lists
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.models.compare import SAMPLES
from tf_fusedrec.models.data_sets.layouts import read_items
from tf_fusedrec.models.data_sets.movielens import convert_movielens
from tf_fusedrec.models.evaluate import Evaluation

USERS = 12


def write_csv(path, head, rows):
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def kuairand(tmp_path_factory):
    """A log of 21 impressions for every user, in no order of time."""
    folder, generator = tmp_path_factory.mktemp("log"), np.random.default_rng(0)
    labels = ("is_click", "long_view", "is_profile_enter", "is_comment")
    rows = [
        (user, generator.integers(30), 1000 * time, 5000, *generator.integers(0, 2, len(labels)))
        for user in range(USERS)
        for time in generator.permutation(21)
    ]
    write_csv(folder / "log.csv", ",".join(["user_id", "video_id", "time_ms", "duration_ms", *labels]), rows)
    features = [(user, "full", "a") for user in range(USERS)]
    write_csv(folder / "user_features.csv", "user_id,user_active_degree,register_days_range", features)
    return folder


@pytest.fixture(scope="module")
def folders(kuairand, tmp_path_factory):
    return quality.data_set_of(kuairand).prepared(kuairand, tmp_path_factory.mktemp("run"))


@pytest.fixture
def ratings(tmp_path):
    """Each of 5 users rates movies 1 to 4 in this order."""
    (tmp_path / "ml").mkdir()
    rows = [(user, movie, 3, 1000 * user + movie) for user in range(1, 6) for movie in range(1, 5)]
    write_csv(tmp_path / "ml/ratings.csv", "user_id,movie_id,rating,timestamp", rows)
    return tmp_path / "ml"


# The queue and its jobs.


def test_jobs_run_in_processes_and_a_failing_one_names_its_log(tmp_path, monkeypatch):
    stub = tmp_path / "python"
    program = (
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        "request = json.loads(sys.argv[4])\nprint('seed', request['seed'])\nif request['seed'] == 3: sys.exit(7)\n"
        "entries = [{'epoch': 1, 'score': 0.5}]\n"
        f"(pathlib.Path(request['folder']) / '{training.RESULT}').write_text(json.dumps(entries))\n"
    )
    stub.write_text(program, encoding="utf-8")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(stub))
    jobs = [training.Job(tmp_path / f"job{seed}", {"seed": seed, "ranks": 1}) for seed in range(4)]
    training.train(jobs[:3])
    assert [job.epochs()[0]["score"] for job in jobs[:3]] == [0.5] * 3
    stamps = [(job.folder / training.RESULT).stat().st_mtime_ns for job in jobs[:3]]
    with pytest.raises(harness.CheckFailed, match="job3 ended with code 7:\nseed 3"):
        training.train(jobs)
    assert stamps == [(job.folder / training.RESULT).stat().st_mtime_ns for job in jobs[:3]], "they ended before"


@pytest.mark.parametrize(
    ("patience", "every", "splits", "trained", "tested"),
    [
        (1, 1, ("validation", "test"), 3, [1, 2]), (2, 1, ("validation",), 4, []), (0, 6, ("test",), 6, [6]),
        (0, 4, ("validation", "test"), 6, [4, 6]),
    ],
)  # fmt: skip
def test_a_training_ends_after_epochs_without_a_better_score(patience, every, splits, trained, tested, tmp_path):
    config = types.SimpleNamespace(
        seed=0, train=types.SimpleNamespace(epochs=6), embedding=types.SimpleNamespace(optimizer="adam")
    )  # fmt: skip
    values = {"validation": [0.5, 0.6, 0.6, 0.5, 0.7, 0.8], "test": [0.3] * 6}
    epochs = []

    def evaluate(folder):
        return Evaluation(dict.fromkeys(("auc", "gauc"), values[folder.name][epochs[-1]]), {"user": np.arange(2)})

    def progress(done):
        options = {"deciding": ["auc", "gauc"], "patience": patience, "every": every, "done": done}
        return training.Progress(tmp_path, config, evaluate, splits={name: name for name in splits}, **options)

    running = progress(done=0)
    running.set_model(types.SimpleNamespace(stop_training=False, submodules=[], drain=lambda: None))
    while not running.model.stop_training:
        epochs.append(len(epochs))
        running.on_epoch_begin(epochs[-1])
        running.on_epoch_end(epochs[-1], {"loss": 1.0, "gflops": 3.0, "samples": 4.0})
    assert len(running.entries) == trained
    assert [entry["epoch"] for entry in running.entries if "test" in entry] == tested
    assert running.entries[0]["forward_mflops"] == 250  # 3 GFLOPs of training are one of four rows forward
    assert progress(done=1).entries == running.entries[:1], "an epoch after the checkpoint is trained again"
    assert progress(done=trained).ended


@pytest.mark.nightly
def test_a_job_trains_evaluates_and_writes_what_a_benchmark_reads(folders, tmp_path):
    data = quality.DATA_SETS[0]
    jobs = quality.Run(data, folders, tmp_path, data.budget)
    job = jobs.job("dlrm", {"model.dropout": 0.1}, 2, 3, "test", 0)
    assert not job.finished
    job.folder.mkdir()
    assert training.train_job(str(job.folder), **job.request) == 2
    first, last = job.epochs()
    assert "test" not in first, "the test split is evaluated once"
    assert sorted(path.name for path in job.folder.iterdir()) == [training.RESULT, SAMPLES]
    assert last["score"] == np.mean([last["test"][name] for name in data.deciding])
    # The main job's baseline, by the other way.
    rates = quality.rates_samples(data, folders["test"][1], 10.0)
    for name in data.deciding:
        assert quality.results_of(rates)[name] == pytest.approx(last["test"][f"baseline_{name}"], abs=1e-12)
    for name in ("user", "item", "time", "long_view_label"):
        np.testing.assert_array_equal(rates[name], job.samples()[name])
    other = quality.Run(data, {"test": folders["validation"]}, tmp_path, data.budget)
    other = other.job("dlrm", {"model.dropout": 0.1}, 2, 3, "test", 0)
    assert other.folder != job.folder, "other data are another job"


# Choices, intervals and moments.


def test_the_mean_over_seeds_chooses_among_epochs_that_all_seeds_have(tmp_path):
    def job(name, *scores):
        entries = [{"epoch": n + 1, "score": score, "validation": {"a": 2 * score}} for n, score in enumerate(scores)]
        (tmp_path / name).mkdir()
        (tmp_path / name / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")
        return training.Job(tmp_path / name, {})

    lucky = [job("a0", 0.5, 0.9), job("a1", 0.5, 0.1, 0.99)]
    steady = [job("b0", 0.5, 0.7), job("b1", 0.4, 0.5)]
    chosen = training.choice([({"x": 1}, lucky), ({"x": 2}, steady)])
    assert chosen["setting"] == {"x": 2} and chosen["epochs"] == 2
    assert chosen["score"] == pytest.approx(0.6) and chosen["validation"] == {"a": pytest.approx(1.2)}
    assert chosen["tried"] == [{"x": 1, "scores": [0.5, 0.5]}, {"x": 2, "scores": [0.45, 0.6]}]


def test_differences_are_of_means_over_seeds_and_draw_users():
    """Users have an AUC of 1 or 0. Half of the users change sides between the models."""
    users = 40

    def samples(wrong):
        user, label = np.repeat(np.arange(users), 2), np.tile([0.0, 1.0], users)
        logit = np.where(np.isin(user, np.flatnonzero(wrong)), -label, label)
        return {"user": user, "a_label": label, "a_logit": logit}

    odd, none = np.arange(users) % 2 == 1, np.zeros(users, bool)
    same = training.differences([samples(odd)], [samples(odd)] * 2, ["a_gauc"], 20)["a_gauc"]
    assert same == {"difference": 0, "low": 0, "high": 0}, "the draws are the same for all models"
    row = training.differences([samples(odd), samples(none)], [samples(none)] * 2, ["a_gauc"], 400)["a_gauc"]
    assert row["difference"] == 0.25  # the mean of 0.5 and 0
    half = 1.96 * 0.25 / np.sqrt(users)  # the other seed adds no users
    assert row["low"] == pytest.approx(0.25 - half, abs=0.2 * half)
    assert row["high"] == pytest.approx(0.25 + half, abs=0.2 * half)
    with pytest.raises(ValueError, match="evaluated on different samples"):
        training.differences([samples(none)], [{**samples(none), "a_label": np.ones(80)}], ["a_gauc"], 1)


# Splits and batches.


def test_validation_holds_out_the_item_before_the_last(ratings, tmp_path):
    convert_movielens(ratings, tmp_path / "whole")
    few = training.cut(tmp_path / "whole", tmp_path / "few", users=2)
    validation = training.cut(few, tmp_path / "validation", part="validation")
    columns = [Column("user_id"), Column("item_id", ragged=True), Column("target_item"), Column("target_timestamp")]
    for folder, history, target in ((few, (1, 2, 3), 4), (validation, (1, 2), 3)):
        rows = sorted(read_lists(ParquetFolder(folder / "test", columns)))
        assert [(user, tuple(items), *rest) for user, items, *rest in rows] == [
            (user, history, target, 1000 * user + target) for user in (1, 2)
        ]
        assert read_items(folder)[0].tolist() == [1, 2, 3, 4], "the catalogue is that of the whole log"
    train = sorted(read_lists(ParquetFolder(validation / "train", columns[:2])))
    assert [(user, tuple(items)) for user, items in train] == [(1, (1, 2)), (2, (1, 2))]


def test_every_user_is_in_one_batch_of_an_epoch(ratings, tmp_path):
    convert_movielens(ratings, tmp_path / "whole")
    experiment = retrieval_ml1m.load(retrieval_ml1m.CONFIG, ["train.epochs=2"])
    (call,) = training._calls_of(experiment, tmp_path / "whole", 2, None)
    batches = [batch["timestamp"].to_list() for batch in call.dataset]
    assert call.steps == 3 and [len(batch) for batch in batches] == [2, 2, 1] * 2
    epochs = [[times[0] // 1000 for batch in half for times in batch] for half in (batches[:3], batches[3:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [1, 2, 3, 4, 5] and epochs[0] != epochs[1]


def test_the_validation_split_is_the_end_of_what_is_before_the_test_split(folders):
    def times(split, part):
        of_user = {}
        for user, shown in read_lists(
            ParquetFolder(folders[split][1] / part, [Column("user_id"), Column("exposed_time", ragged=True)])
        ):
            of_user[user] = sorted([*of_user.get(user, []), *shown])
        return of_user

    for user, shown in times("test", "train").items():
        assert shown == list(range(17))  # 80 % of 21, rounded up
        assert times("validation", "train")[user] == shown[:14] and times("validation", "test")[user] == shown[14:]


# The benchmarks, with a stand-in of the queue.


class Queue:
    """Writes the files of each job in place of training it.

    Args:
      entries: Returns the entries of a request.
      samples: Returns the samples of a request.
    """

    def __init__(self, monkeypatch, entries, samples):
        self.requests, self._entries, self._samples = [], entries, samples
        monkeypatch.setattr(training, "train", self)
        monkeypatch.setattr(harness, "commit", lambda: "")  # it would run git as a process

    def __call__(self, jobs):
        for job in jobs:
            if job.finished:
                continue
            self.requests.append(job.request)
            job.folder.mkdir(parents=True)
            np.savez(job.folder / SAMPLES, **self._samples(job.request))
            entries = [{"processor_seconds": 1.0, "epoch": n + 1, **entry}
                       for n, entry in enumerate(self._entries(job.request))]  # fmt: skip
            (job.folder / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")


def read(path):
    return {**json.loads(path.read_text(encoding="utf-8")), "load_average": 0}


@pytest.mark.parametrize(("number", "log"), [(0, "kuairand"), (2, "ratings")], ids=["ranking", "retrieval"])
def test_the_validation_split_alone_chooses_setting_and_epochs(number, log, request, tmp_path, monkeypatch):
    """With every model, a dropout of 0.3 is better than one of 0.1, and best in its second epoch."""
    data = quality.DATA_SETS[number]
    model_of = (lambda model: model["kind"]) if data.tasks else (lambda model: model["encoder"].removesuffix("_alpha"))

    def entries(job):
        results = dict.fromkeys([*data.metrics, "baseline_hr@10", "baseline_ndcg@10"], 0.25)
        dropout, epochs = job["experiment"]["model"]["dropout"], job["experiment"]["train"]["epochs"]
        scores = [0.8 if (dropout, epoch) == (0.3, 1) else 0.6 for epoch in range(epochs)]
        return [{"score": score, **dict.fromkeys(job["splits"], results)} for score in scores]

    def samples(job):
        ranked = {"user": np.arange(2), "rank": np.array([1, 9])}
        return quality.rates_samples(data, pathlib.Path(job["data"]), 10.0) if data.tasks else ranked

    queue = Queue(monkeypatch, entries, samples)
    budget = quality.Budget(settings=2, epochs=3, patience=2, tuning_seeds=(0, 1), seeds=(0, 1))
    grid = ({"model.dropout": 0.1}, {"model.dropout": 0.3})
    files = data.files if data.tasks else ("ratings.csv",)
    monkeypatch.setattr(quality, "DATA_SETS", (data._replace(files=files, grid=grid, budget=budget),))
    monkeypatch.setattr(training.differences, "__defaults__", (20,))
    source, output = request.getfixturevalue(log), tmp_path / "r.json"
    given = ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(output)]
    quality.main(given)
    trained = sorted(
        (model_of(one["model"]), *job["splits"], one["model"]["dropout"], one["train"]["epochs"], one["seed"])
        for job in queue.requests
        for one in [job["experiment"]]
    )
    assert trained == sorted(
        (model, *job, seed)
        for model in data.configs
        for job in (("validation", 0.1, 3), ("validation", 0.3, 3), ("test", 0.3, 2))
        for seed in (0, 1)
    )
    result = read(output)
    for name in data.configs:
        chosen = result["models"][name]
        assert (chosen["setting"], chosen["epochs"], chosen["score"]) == (grid[1], 2, 0.8)
        assert {result[f"{field}_{name}"] for field in data.metrics.values()} == {0.25}
    quality.main(given)
    assert len(queue.requests) == len(trained) and read(output) == result, "a finished job is not trained again"


def test_figures_are_the_last_epochs_or_those_that_validation_chose(ratings, tmp_path, monkeypatch):
    def entries(request):
        names = (*retrieval_ml1m.METRICS,)
        tested = [{"score": score, **{split: dict.fromkeys(names, value) for split in request["splits"]}}
                  for score, value in ((0.4, 0.7), (0.3, 0.6))]  # fmt: skip
        return [tested[0], {}, tested[1]]

    Queue(monkeypatch, entries, lambda request: {"user": np.arange(2)})
    given = ["--data", str(ratings), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    for flags, epoch, value in (([], 3, 0.6), (["--validation", "--model", "sasrec"], 1, 0.7)):
        retrieval_ml1m.main([*given, *flags])
        result = read(tmp_path / "r.json")
        assert (result["best_epoch"], result["hr_at_10"], result["epochs"]) == (epoch, value, 3)
        assert result["curve"] == [{"epoch": 1, "hr_at_10": 0.7}, {"epoch": 3, "hr_at_10": 0.6}]


def answers(changed):
    """Returns a stand-in of processes.ask: GAUC and AUC rise by 0.1 per point, and `changed` adds to one variant."""

    def ask(function, *, variables, experiment, backend, data):
        add = changed.get((backend, experiment["seed"]), lambda point: 0.0)
        names = [f"{task}_{metric}" for task in ("ctr", "long_view") for metric in ("gauc", "auc")]
        return [{"step": point, **{name: 0.5 + 0.1 * point + add(point) for name in names}} for point in range(3)]

    return ask


def test_the_largest_difference_at_any_point_is_reported(folders, monkeypatch):
    def measure(changed):
        monkeypatch.setattr(processes, "ask", answers(changed))
        variants = (quality.NATIVE, quality.TFRA, quality.OTHER_SEED)
        return quality.measure_tables(quality.DATA_SETS[0], folders["test"][0], 3, variants)

    result = measure({("tfra", 0): lambda point: 0.01 * (point == 1), ("native", 1): lambda point: 0.02 * point})
    assert result["gauc_difference"] == result["second_auc_difference"] == pytest.approx(0.01)
    assert result["auc_difference_seeds"] == pytest.approx(0.04)
    assert result["gauc"] == pytest.approx({"native": 0.7, "tfra": 0.7}) and result["steps"] == 2
    assert [(one["backend"], one["seed"]) for one in result["curves"]] == [("native", 0), ("tfra", 0), ("native", 1)]
    with pytest.raises(harness.CheckFailed, match="ctr_gauc before the first step"):
        measure({("tfra", 0): lambda point: 0.01 * (point == 0)})
