"""benchmarks.retrieval_sports on a small log: its splits, jobs, choice of settings, results and JSON fields."""

import gzip
import json
import math

import numpy as np
import pytest

from benchmarks.harness import training
from benchmarks.retrieval_sports import __main__ as benchmark
from models.compare import SAMPLES
from tests.data.shards import read_lists
from tf_fusedrec.data import Column, ParquetFolder, read_items

USERS, ITEMS, DAY = 40, 30, 86400


def log_of(users, items, seed=0):
    """Returns the items of each user in order, with many equal times."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(5, 9, users)
    return {user + 1: (generator.choice(items, count, replace=False) + 1).tolist() for user, count in enumerate(counts)}


LOG = log_of(USERS, ITEMS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sports")
    lines = ["user_id,item_id,timestamp"]
    for user, items in LOG.items():
        # Three items a day, so that the order of the file decides which item is the last.
        lines += [f"{user},{item},{10**9 // DAY * DAY + place // 3 * DAY}" for place, item in enumerate(items)]
    with gzip.open(folder / benchmark.LOG, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def folders(source, tmp_path_factory):
    return benchmark.prepared(source, tmp_path_factory.mktemp("run"), None)


@pytest.fixture
def run(folders, tmp_path, monkeypatch):
    grid = tuple({"model.dim": 8, "model.dropout": dropout} for dropout in (0.2, 0.5))
    monkeypatch.setattr(benchmark, "GRID", grid)
    return benchmark.Run(folders, tmp_path, benchmark.Budget(settings=2, epochs=3, patience=2))


def rows_of(folder, part):
    """Returns history and target, if there is one, by user."""
    columns = [Column("user_id"), Column("item_id", ragged=True)]
    columns += [Column("target_item")] if part == "test" else []
    rows = read_lists(ParquetFolder(folder / part, columns))
    return {user: (list(history), *target) for user, history, *target in rows}


def test_the_last_item_is_test_and_the_one_before_validation(folders):
    for user, items in LOG.items():
        assert rows_of(folders["test"], "train")[user] == (items[:-1],)
        assert rows_of(folders["test"], "test")[user] == (items[:-1], items[-1])
        assert rows_of(folders["validation"], "train")[user] == (items[:-2],)
        assert rows_of(folders["validation"], "test")[user] == (items[:-2], items[-2])
    everything = sorted({item for items in LOG.values() for item in items})
    for folder in folders.values():
        np.testing.assert_array_equal(read_items(folder)[0], everything)


def popularity_ranks():
    """Ranks of the last items by training counts, among the items that a user has not seen; earlier ids first."""
    counts = {item: 0 for items in LOG.values() for item in items}
    for items in LOG.values():
        for item in items[:-1]:
            counts[item] += 1
    ranks = []
    for items in LOG.values():
        left = sorted(set(counts) - set(items[:-1]), key=lambda item: (-counts[item], item))
        ranks.append(1 + left.index(items[-1]))
    return ranks


def test_models_differ_in_the_encoder_alone(run):
    experiments = {name: run.tuning(name, {}).request["experiment"] for name in benchmark.MODELS}
    encoders = {name: experiment["model"].pop("encoder") for name, experiment in experiments.items()}
    assert encoders == {"sasrec": "sasrec", "hstu": "hstu", "fuxi": "fuxi_alpha"}
    assert experiments["sasrec"] == experiments["hstu"] == experiments["fuxi"]


@pytest.mark.nightly
@pytest.mark.parametrize("model", benchmark.MODELS)
def test_a_job_trains_and_is_evaluated_on_the_held_out_split(model, run, monkeypatch):
    for number, setting in enumerate(run.settings):
        job = run.tuning(model, setting)
        job.folder.mkdir()
        entries = [{"epoch": n + 1, "score": 0.1 * number + 0.01 * (n == 1), "held_out": {}} for n in range(3)]
        (job.folder / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")
    for part, trained in (("test", "validation"), ("test_all_items", "test")):
        job = run.final(model, part)
        assert (job.request["data"], job.request["held_out"]) == (str(run.folders[trained]), str(run.folders["test"]))
        job.folder.mkdir()
        entries = training.train_job(str(job.folder), **job.request)
        assert [entry["epoch"] for entry in entries] == [1, 2], "validation chose two epochs"
        assert "held_out" not in entries[0], "the test split is evaluated once"
        results, samples = entries[1]["held_out"], job.samples()
        assert results["users"] == USERS and samples["user"].tolist() == sorted(LOG)
        ranks = samples["rank"].tolist()
        assert results["hr@10"] == pytest.approx(sum(rank <= 10 for rank in ranks) / USERS)
        gain = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10)
        assert results["ndcg@10"] == entries[1]["score"] == pytest.approx(gain / USERS)
    # The baseline counts the items of the folder that the model trains on; here all but the last.
    wanted = popularity_ranks()
    assert results["baseline_hr@10"] == pytest.approx(sum(rank <= 10 for rank in wanted) / USERS)
    gain = sum(1 / math.log2(rank + 1) for rank in wanted if rank <= 10)
    assert results["baseline_ndcg@10"] == pytest.approx(gain / USERS)


class Trainer:
    """Replaces the processes: records the jobs and writes the files of training.train_job."""

    def __init__(self, limit=None):
        self.jobs, self.limit = [], limit

    def __call__(self, given):
        for one in given:
            if one.finished:
                continue
            if len(self.jobs) == self.limit:
                raise KeyboardInterrupt
            one.folder.mkdir(parents=True, exist_ok=True)
            experiment, patience = one.request["experiment"], one.request["patience"]
            encoder, dropout = experiment["model"]["encoder"], experiment["model"]["dropout"]
            epochs, trained = experiment["train"]["epochs"], one.request["data"]
            on_all_items = trained == one.request["held_out"] and not patience
            self.jobs.append((encoder, bool(patience), dropout, epochs, experiment["seed"], on_all_items))
            # HSTU is better with less dropout in its second epoch, the others with more in the third.
            good = (encoder == "hstu") == (dropout == 0.2)
            best = 2 if encoder == "hstu" else 3
            scores = [0.2 if good and epoch == best else 0.1 for epoch in range(1, epochs + 1)]
            value = 0.3 if on_all_items else 0.25
            held_out = {"hr@10": value, "ndcg@10": value / 2, "baseline_hr@10": 0.01, "baseline_ndcg@10": 0.005}
            entries = [
                {"epoch": n + 1, "score": score, "held_out": held_out, "processor_seconds": 1.0}
                for n, score in enumerate(scores)
            ]
            np.savez(one.folder / SAMPLES, user=np.arange(2), rank=np.array([1, 9]))
            (one.folder / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")


@pytest.fixture
def given(source, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "GRID", ({"model.dropout": 0.2}, {"model.dropout": 0.5}))
    monkeypatch.setattr(benchmark, "Budget", lambda **fields: RUN_BUDGET._replace(**fields))
    return ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "result.json")]


RUN_BUDGET = benchmark.Budget(settings=2, epochs=4, patience=2)
ENCODERS = {"sasrec": ("sasrec", 0.5, 3), "hstu": ("hstu", 0.2, 2), "fuxi": ("fuxi_alpha", 0.5, 3)}


def read(given):
    with open(given[-1], encoding="utf-8") as file:
        return {**json.load(file), "load_average": 0}


def test_the_validation_split_alone_chooses_and_finished_jobs_stay(given, monkeypatch, capsys):
    trainer = Trainer()
    monkeypatch.setattr(training, "train", trainer)
    benchmark.main(given)
    tuning = [(encoder, True, dropout, 4, 0, False) for dropout in (0.2, 0.5) for encoder, _, _ in ENCODERS.values()]
    final = [
        (encoder, False, dropout, epochs, 1, on_all_items)
        for on_all_items in (False, True)
        for encoder, dropout, epochs in ENCODERS.values()
    ]
    assert trainer.jobs == tuning + final, "every model has the same settings, and each round all models"
    result = read(given)
    assert result["missing"] == [] and result["settings"] == 2
    for name, (_, dropout, epochs) in ENCODERS.items():
        chosen = result["models"][name]
        assert (chosen["setting"]["model.dropout"], chosen["epochs"]) == (dropout, epochs)
        assert (chosen["score"], len(chosen["tried"])) == (0.2, 2)
        assert (chosen["test"]["hr@10"], chosen["test_all_items"]["hr@10"]) == (0.25, 0.3)
        assert (result[f"hr_at_10_{name}"], result[f"ndcg_at_10_{name}"]) == (0.25, 0.125)
        assert set(result["published"][name]) == {"hr_at_10", "ndcg_at_10"}
    assert (result["hr_at_10_popularity"], result["ndcg_at_10_popularity"]) == (0.01, 0.005)
    assert "order of the file" in result["protocol"] and "missing: nothing" in capsys.readouterr().out
    benchmark.main(given)
    assert len(trainer.jobs) == 12, "a finished job is not trained again"
    assert read(given) == result
    benchmark.main([*given[:4], "--settings", "1", *given[4:]])
    assert read(given)["settings"] == 1 and read(given)["models"]["sasrec"]["setting"] == {"model.dropout": 0.2}


@pytest.mark.parametrize("limit", [4, 8])
def test_a_stopped_run_tells_what_is_missing_and_goes_on(limit, given, monkeypatch):
    monkeypatch.setattr(training, "train", Trainer(limit))
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(given)
    result = read(given)
    assert set(result["models"]) == set(benchmark.MODELS)
    if limit == 4:  # in the second round of tuning
        assert result["missing"][:3] == ["sasrec {'model.dropout': 0.5}", "sasrec test", "sasrec test_all_items"]
        assert len(result["missing"]) == 9 and "hr_at_10_sasrec" not in result
    else:  # in the round of `test`: the file is of the round before
        assert result["missing"] == [f"{model} {part}" for model in benchmark.MODELS for part in benchmark.PARTS]
        assert "test" not in result["models"]["sasrec"]
    monkeypatch.setattr(training, "train", trainer := Trainer())
    benchmark.main(given)
    assert len(trainer.jobs) == 12 - limit and read(given)["missing"] == []
