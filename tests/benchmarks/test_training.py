"""Trainings as jobs: the queue, resumption, choices by validation, intervals, splits, and the benchmarks that use them.

Benchmarks run with a stand-in of the queue, but for one job of each form.
"""

import json
import os
import pathlib
import signal
import stat
import sys
import types

import numpy as np
import pytest

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, training
from benchmarks.quality import __main__ as quality
from benchmarks.retrieval_ml1m import __main__ as retrieval_ml1m
from benchmarks.schedule_quality import __main__ as schedule_quality
from tests.data.shards import read_lists
from tests.models import experiments
from tests.support.ranks import RanksFailed, run_ranks
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.models.compare import SAMPLES
from tf_fusedrec.models.data_sets.layouts import read_items
from tf_fusedrec.models.data_sets.movielens import convert_movielens
from tf_fusedrec.models.evaluate import Evaluation
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.prepare import prepare_data

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


KILLED_IN, EPOCHS = 3, 6


def train_killed(folder, request, killed_in):
    """Runs or resumes a job. Its ranks end without a warning at the second step of the epoch `killed_in`."""
    begun, on_epoch_begin = [], training.Progress.on_epoch_begin

    def on_epoch_begin_of(self, epoch, logs=None):
        begun.append(epoch)
        on_epoch_begin(self, epoch, logs)

    def on_train_batch_end(self, batch, logs=None):
        if begun[-1] == killed_in and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    training.Progress.on_epoch_begin, training.Progress.on_train_batch_end = on_epoch_begin_of, on_train_batch_end
    training.on_rank(str(folder), **request)
    return begun


def written(folder, name):
    """Returns the entries without their times, and the samples of the best epoch."""
    entries = json.loads((folder / name).read_text(encoding="utf-8"))
    with np.load(folder / SAMPLES) as file:
        samples = {name: file[name] for name in file.files}
    return [{**entry, "seconds": 0, "processor_seconds": 0} for entry in entries], samples


@pytest.mark.nightly
def test_a_killed_job_resumes_to_the_same_result(tmp_path):
    fields = {**experiments.RETRIEVAL, "model": {**experiments.RETRIEVAL["model"], "dropout": 0.2}}
    fields["train"] = {**experiments.RETRIEVAL["train"], "epochs": EPOCHS}
    fields["embedding"] = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    experiment = from_dict(fields)
    test = prepare_data(experiment, tmp_path / "data")
    validation = training.cut(test, tmp_path / "validation", last=False)
    job = training.job_of("a", experiment, tmp_path, validation, {"validation": validation, "test": test},
                          deciding=["ndcg@10"], patience=EPOCHS)  # fmt: skip
    request = {name: value for name, value in job.request.items() if name != "ranks"}
    whole, killed = (pathlib.Path(tmp_path / name) for name in ("whole", "killed"))
    for folder in (whole, killed):
        folder.mkdir()
    run_ranks(train_killed, 2, timeout_s=900, folder=whole, request=request, killed_in=None)
    entries, samples = written(whole, training.RESULT)
    assert [entry["epoch"] for entry in entries] == list(range(1, EPOCHS + 1))
    assert entries[0]["loss"] > entries[-1]["loss"] and entries[0]["moment"] > 0
    with pytest.raises(RanksFailed):
        run_ranks(train_killed, 2, timeout_s=900, folder=killed, request=request, killed_in=KILLED_IN)
    assert len(written(killed, training.EPOCHS)[0]) == KILLED_IN and not (killed / training.RESULT).exists()
    begun = run_ranks(train_killed, 2, timeout_s=900, folder=killed, request=request, killed_in=None)
    assert begun[0][0] in (KILLED_IN - 1, KILLED_IN), "a save in the background may lack the last epoch"
    resumed, same_samples = written(killed, training.RESULT)
    assert resumed == entries
    for name, values in samples.items():
        np.testing.assert_array_equal(same_samples[name], values)


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


def test_moments_of_groups_grow_as_the_proposition_says():
    """Algorithm 1 of 2D-SP in NumPy: 8 ranks with i.i.d. gradients, in 1, 2 and 4 groups, over 4,000 steps."""
    rng = np.random.default_rng(0)
    gradients = 0.3 + rng.standard_normal([4000, 8, 5])  # steps, ranks, columns

    def accumulated(groups):
        of_group = gradients.reshape(4000, groups, 8 // groups, 5).mean(axis=2)
        return np.cumsum(np.sum(of_group**2, axis=2).mean(axis=1))  # lines 5 and 10

    measured = {groups: accumulated(groups) for groups in (1, 2, 4)}
    expected = schedule_quality.expected_moment(4, measured[1], measured[2])
    assert measured[4][-1] == pytest.approx(expected[-1], rel=0.05)
    curves = {groups: [{"moment": moment} for moment in measured[groups][-2:]] for groups in (1, 2)}
    last = schedule_quality.growth({**curves, 4: []})[-1]
    assert last == {"epoch": 2, "measured_1": measured[1][-1], "measured_2": measured[2][-1],
                    "expected_4": expected[-1]}  # fmt: skip


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
    assert training.mean_moment(embedding) == pytest.approx((25.0 + 100.0) / 2)


# Splits and batches.


def test_validation_holds_out_the_item_before_the_last(ratings, tmp_path):
    convert_movielens(ratings, tmp_path / "whole")
    few = training.cut(tmp_path / "whole", tmp_path / "few", users=2)
    validation = training.cut(few, tmp_path / "validation", last=False)
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


WRONG = {"grm": 0, "dcn": 4, "din": 8, "dlrm": 10}  # exposures with a wrong logit, of twenty


def ranking_queue(monkeypatch):
    """GRM is best and DCN-V2 the best baseline. More dropout is better, in the second epoch."""

    def entries(request):
        model, data = request["experiment"]["model"], quality.DATA_SETS[0]
        results = dict.fromkeys(data.deciding, 1 - WRONG[model["kind"]] / 20)
        scores = [
            0.8 if model["dropout"] == 0.3 and n == 1 else 0.6 for n in range(request["experiment"]["train"]["epochs"])
        ]
        (split,) = request["splits"]
        return [{"score": score, split: results, "forward_mflops": model["dim"]} for score in scores]

    def samples(request):
        data = quality.DATA_SETS[0]
        shown = quality.rates_samples(data, pathlib.Path(request["data"]), 10.0)
        for task in data.tasks:
            logit = np.where(shown[f"{task}_label"] > 0, 1.0, -1.0)
            wrong = 7 * np.arange(len(logit)) % 20 < WRONG[request["experiment"]["model"]["kind"]]
            shown[f"{task}_logit"] = np.where(wrong, -logit, logit)
        return shown

    return Queue(monkeypatch, entries, samples)


def kinds(queue):
    """Returns model, split, dropout, epochs and seed of each trained job."""
    return sorted(
        (one["model"]["kind"], *request["splits"], one["model"]["dropout"], one["train"]["epochs"], one["seed"])
        for request in queue.requests
        for one in [request["experiment"]]
    )


def test_the_validation_split_alone_chooses_a_ranking_model(kuairand, tmp_path, monkeypatch):
    queue = ranking_queue(monkeypatch)
    budget = quality.Budget(settings=2, epochs=3, patience=2, tuning_seeds=(0, 1), seeds=(0, 1))
    grid = ({"model.dropout": 0.1}, {"model.dropout": 0.3})
    monkeypatch.setattr(quality, "DATA_SETS", (quality.DATA_SETS[0]._replace(grid=grid, budget=budget),))
    monkeypatch.setattr(training.differences, "__defaults__", (20,))
    given = ["--data", str(kuairand), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    quality.main(given)
    models, seeds = quality.DATA_SETS[0].configs, (0, 1)
    assert kinds(queue) == sorted(
        [(model, "validation", dropout, 3, seed) for model in models for dropout in (0.1, 0.3) for seed in seeds]
        + [(model, "test", 0.3, 2, seed) for model in models for seed in seeds]
    )
    result = read(tmp_path / "r.json")
    for name in models:
        chosen = result["models"][name]
        assert (chosen["setting"], chosen["epochs"], chosen["score"]) == ({"model.dropout": 0.3}, 2, 0.8)
    assert (result["auc_grm"], result["gauc_dcn"], result["second_auc_din"]) == (1.0, 0.8, 0.6)
    assert len(result["models"]["rates"]["tried"]) == 2 and 0 < result["gauc_rates"] < 1
    assert result["gauc_best_baseline"] == result["second_auc_best_baseline"] == "dcn"
    assert 0 < result["auc_difference_low"] <= result["auc_difference"] <= result["auc_difference_high"]
    assert set(result["differences"]) == {"dlrm", "din", "dcn", "rates"}
    quality.main(given)
    assert len(queue.requests) == 24 and read(tmp_path / "r.json") == result, "a finished job is not trained again"


def test_sizes_of_grm_and_dlrm(kuairand, tmp_path, monkeypatch):
    queue = ranking_queue(monkeypatch)
    given = ["--data", str(kuairand), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json"), "--sizes"]
    quality.main([*given, "--quick"])
    assert kinds(queue) == sorted(
        2 * [(model, *job, 0) for model in ("grm", "dlrm") for job in (("test", 0.1, 1), ("validation", 0.1, 2))]
    )
    entries = read(tmp_path / "r.json")["sizes"]
    assert [(one["model"], one["size"], one["forward_mflops"], one["gauc"], one["gauc_seeds"]) for one in entries] == [
        ("grm", 1, 16, 1.0, [1.0]), ("grm", 2, 32, 1.0, [1.0]), ("dlrm", 1, 16, 0.5, [0.5]),
        ("dlrm", 2, 32, 0.5, [0.5]),
    ]  # fmt: skip


@pytest.mark.parametrize("data", quality.DATA_SETS[:2], ids=lambda data: data.name)
def test_all_models_of_a_data_set_read_the_same_columns(data):
    first, *others = [data.experiment(model) for model in data.configs]
    # GRM sees times by its attention. Dropout is regularisation, like the settings of the grid.
    own = {"kind", "time_features", "dropout", "history_dropout", "item_dropout"}
    for other in others:
        assert other.data == first.data
        shared = set(vars(first.model)) & set(vars(other.model)) & set(vars(data.experiment("dlrm").model)) - own
        assert {name: getattr(other.model, name) for name in shared} == {
            name: getattr(first.model, name) for name in shared
        }


def test_retrieval_models_differ_in_the_encoder_and_are_tuned_by_one_budget(ratings, tmp_path, monkeypatch):
    def entries(request):
        # HSTU is better with less dropout in its second epoch, the others with more in the third.
        model, epochs = request["experiment"]["model"], request["experiment"]["train"]["epochs"]
        hstu = model["encoder"] == "hstu"
        good = hstu == (model["dropout"] == 0.2)
        results = {"hr@10": 0.25, "ndcg@10": 0.125, "baseline_hr@10": 0.01, "baseline_ndcg@10": 0.005}
        (split,) = request["splits"]
        return [{"score": 0.2 if good and n == (1 if hstu else 2) else 0.1, split: results} for n in range(epochs)]

    queue = Queue(monkeypatch, entries, lambda request: {"user": np.arange(2), "rank": np.array([1, 9])})
    grid = ({"model.dropout": 0.2}, {"model.dropout": 0.5})
    budget = quality.Budget(settings=2, epochs=4, patience=2, tuning_seeds=(0,), seeds=(1,))
    data = quality.DATA_SETS[2]._replace(files=("ratings.csv",), grid=grid, budget=budget)
    monkeypatch.setattr(quality, "DATA_SETS", (data,))
    run = tmp_path / "run"
    quality.main(["--data", str(ratings), "--run", str(run), "--json", str(tmp_path / "r.json")])
    fields = read(tmp_path / "r.json")
    (validation,) = (run / "data").glob("*_validation")
    sample, test = f"{validation}_sample", str(validation).removesuffix("_validation")
    for request in queue.requests[:6]:
        assert (request["data"], request["splits"]) == (str(validation), {"validation": sample})
    experiments_of = [{**one["experiment"], "model": {**one["experiment"]["model"]}} for one in queue.requests[:6:2]]
    assert [one["model"].pop("encoder") for one in experiments_of] == ["sasrec", "hstu", "fuxi_alpha"]
    assert experiments_of[0] == experiments_of[1] == experiments_of[2]
    assert [(one["data"], one["splits"]) for one in queue.requests[6:]] == 3 * [(str(validation), {"test": test})]
    assert {one["experiment"]["seed"] for one in queue.requests[6:]} == {1}
    for name in data.configs:
        chosen, (dropout, epochs) = fields["models"][name], (0.2, 2) if name == "hstu" else (0.5, 3)
        assert (chosen["setting"], chosen["epochs"]) == ({"model.dropout": dropout}, epochs)
        assert fields[f"hr_at_10_{name}"] == 0.25 and set(fields["published"][name]) == {"hr_at_10", "ndcg_at_10"}
    assert (fields["hr_at_10_popularity"], fields["ndcg_at_10_popularity"]) == (0.01, 0.005)


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


def test_variants_are_compared_with_sync_of_the_same_seeds(ratings, tmp_path, monkeypatch):
    users = 40

    def lower(request):
        """semi_async ranks the target one place lower for every second user, with both seeds."""
        return np.arange(users) % 2 if request["experiment"]["train"]["schedule"] == "semi_async" else np.zeros(users)

    def samples(request):
        found = {"user": np.arange(users), "rank": np.full(users, 10) + lower(request), "entropy": np.full(users, 3.0)}
        return {**found, "baseline_entropy": np.full(users, 4.0)}

    def entries(request):
        hit = 1 - float(np.mean(lower(request)))
        results = {"hr@10": hit, "ndcg@10": hit / np.log2(11), "ne": 0.75}
        return [{"score": 0.1 * n, "moment": 1.0, "validation": results, "test": results} for n in range(3)]

    queue = Queue(monkeypatch, entries, samples)
    monkeypatch.setattr(training.differences, "__defaults__", (200,))
    given = ["--data", str(ratings), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    schedule_quality.main([*given, "--variants", "sync", "semi_async"])
    result = read(tmp_path / "r.json")
    assert len(queue.requests) == 4 and {request["ranks"] for request in queue.requests} == {4}
    sync, row = result["variants"]["sync"], result["variants"]["semi_async"]
    assert sync["hr_at_10"] == 1 and row["hr_at_10_difference"] == -0.5 and row["seeds"] == [1, 2]
    # Both seeds lose the same users, so a draw of users loses as many with two seeds as with one. 200 draws give the
    # ends of the interval to a tenth.
    half = 1.96 * 0.5 / np.sqrt(users)
    assert row["hr_at_10_low"] == pytest.approx(-0.5 - half, abs=0.2 * half)
    assert row["hr_at_10_high"] == pytest.approx(-0.5 + half, abs=0.2 * half)
    assert (row["ne"], row["ne_low"], row["ne_high"]) == (0.75, 0, 0) and result["users"] == users


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


@pytest.mark.nightly
def test_both_tables_train_the_same_model(folders):
    pytest.importorskip("tensorflow_recommenders_addons", reason="TFRA is not installed")
    experiment = quality.DATA_SETS[0].experiment("grm", ["train.epochs=2"]).to_dict()
    native, tfra = [quality.train_curve(experiment, backend, str(folders["test"][0])) for backend in ("native", "tfra")]
    assert [point["step"] for point in native] == [point["step"] for point in tfra] and len(native) > 2
    assert native[-1]["loss"] != native[0]["loss"], "the model trained"
    for one, other in zip(native, tfra):
        # Sums of float32 in another order, over a few steps.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
