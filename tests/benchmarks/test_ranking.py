"""benchmarks.ranking and benchmarks.convergence on a small KuaiRand log: splits, jobs, choices, intervals, fields."""

import dataclasses
import json
import pathlib
import stat
import sys

import numpy as np
import pytest

from benchmarks.convergence import __main__ as convergence
from benchmarks.harness import harness, processes, training
from benchmarks.ranking import __main__ as benchmark
from benchmarks.ranking import data_sets, summary
from models.compare import SAMPLES
from models.experiment.ranking_config import RankingConfig
from tests.data.shards import read_lists
from tf_fusedrec.data import Column, ParquetFolder

LABELS = ("is_click", "long_view", "is_profile_enter", "is_comment")
USERS, IMPRESSIONS = 12, 21


def write_log(folder: pathlib.Path) -> pathlib.Path:
    """Writes the log and the users' features into `folder`, and returns it."""
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


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def data(source):
    return data_sets.data_set_of(source)


@pytest.fixture(scope="module")
def folders(data, source, tmp_path_factory):
    return data.prepared(source, tmp_path_factory.mktemp("run"))


def _times(folder, part):
    """Returns the sorted times of the exposures of a part, by user."""
    columns = [Column("user_id"), Column("exposed_time", ragged=True)]
    found: dict[int, list[int]] = {}
    for user, times in read_lists(ParquetFolder(folder / part, columns)):
        found[user] = sorted([*found.get(user, []), *times])
    return found


def test_the_validation_split_is_the_end_of_what_is_before_the_test_split(folders):
    for user, times in _times(folders["test"], "train").items():
        assert times == list(range(17))  # 80 % of 21, rounded up
        assert _times(folders["validation"], "train")[user] == times[:14]
        assert _times(folders["validation"], "test")[user] == times[14:]


@pytest.mark.parametrize("data", data_sets.DATA_SETS, ids=lambda data: data.name)
def test_all_models_of_a_data_set_read_the_same_columns(data):
    first, *others = [data.experiment(model) for model in data_sets.MODELS]
    # GRM sees times by its attention. Dropout is regularisation, like the settings of the grid.
    own = ("time_features", "dropout", "history_dropout", "item_dropout")
    shared = [field.name for field in dataclasses.fields(RankingConfig) if field.name not in own]
    for one in others:
        assert one.data == first.data
        assert [getattr(one.model, name) for name in shared] == [getattr(first.model, name) for name in shared]


def test_a_job_trains_evaluates_and_writes_what_the_summary_reads(data, folders, tmp_path):
    one = data.job("dlrm", {"model.dropout": 0.1}, 2, 3, folders["test"], tmp_path)
    assert not one.finished and one.folder.name.startswith("dlrm_seed3_")
    one.folder.mkdir()
    entries = training.train_job(str(one.folder), **one.request)
    assert one.finished and one.epochs() == entries and [entry["epoch"] for entry in entries] == [1, 2]
    assert "held_out" not in entries[0], "the test split is evaluated once"
    assert entries[0]["forward_mflops"] == entries[1]["forward_mflops"] > 0
    results = entries[1]["held_out"]
    assert results["exposures"] == USERS * 4 == len(one.samples()["user"])
    metrics = [results[f"{task}_{metric}"] for task in ("ctr", "long_view") for metric in ("auc", "gauc")]
    assert entries[1]["score"] == np.mean(metrics)
    # The main job's baseline, by the other way.
    config = data.experiment("dlrm").model
    of_rates = summary.rates_results(config, folders["test"], 10.0)
    for name in ("ctr_auc", "ctr_gauc", "long_view_auc", "long_view_gauc"):
        assert of_rates[name] == pytest.approx(results[f"baseline_{name}"], abs=1e-12)
    assert of_rates != summary.rates_results(config, folders["test"], 100.0)
    ours = summary.rates_samples(config, folders["test"], 10.0)
    for name in ("user", "item", "time", "long_view_label"):
        np.testing.assert_array_equal(ours[name], one.samples()[name])


@pytest.mark.parametrize(("patience", "epochs"), [(1, [1, 2, 3]), (2, [1, 2, 3, 4]), (0, [6])])
def test_training_ends_after_epochs_without_a_better_score(patience, epochs):
    scores = iter([0.5, 0.6, 0.6, 0.5, 0.7, 0.8])
    evaluated = []

    def evaluate():
        value = next(scores)
        return training.Evaluation(dict.fromkeys(("a_auc", "a_gauc"), value), {})

    progress = training.Progress(evaluate, ["a_auc", "a_gauc"], 6, patience)
    progress.set_model(type("Model", (), {"stop_training": False})())
    for epoch in range(6):
        progress.on_epoch_begin(epoch)
        progress.on_epoch_end(epoch, {"loss": 1.0, "gflops": 3.0, "samples": 4.0})
        evaluated += [epoch + 1] if "score" in progress.entries[-1] else []
        if progress.model.stop_training:
            break
    assert evaluated == epochs
    assert progress.entries[0]["forward_mflops"] == 250  # 3 GFLOPs of training are one of four rows forward


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
    made = [training.Job(tmp_path / f"job{seed}", {"seed": seed}) for seed in range(4)]
    training.train(made[:3], workers=2)
    assert [one.epochs()[0]["score"] for one in made[:3]] == [0.5] * 3
    stamps = [(one.folder / training.RESULT).stat().st_mtime_ns for one in made[:3]]
    with pytest.raises(harness.CheckFailed, match="job3 ended with code 7:\nseed 3"):
        training.train(made, workers=2)
    assert stamps == [(one.folder / training.RESULT).stat().st_mtime_ns for one in made[:3]], "they ended before"


def test_the_mean_over_seeds_chooses_among_epochs_that_all_seeds_have(tmp_path):
    def job(name, *scores):
        entries = [{"epoch": n + 1, "score": score, "held_out": {"a": 2 * score}} for n, score in enumerate(scores)]
        (tmp_path / name).mkdir()
        (tmp_path / name / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")
        return training.Job(tmp_path / name, {})

    lucky = [job("a0", 0.5, 0.9), job("a1", 0.5, 0.1, 0.99)]
    steady = [job("b0", 0.5, 0.7), job("b1", 0.4, 0.5)]
    chosen = training.choice([({"x": 1}, lucky), ({"x": 2}, steady)])
    assert chosen["setting"] == {"x": 2} and chosen["epochs"] == 2
    assert chosen["score"] == pytest.approx(0.6) and chosen["validation"] == {"a": pytest.approx(1.2)}
    assert chosen["tried"] == [{"x": 1, "scores": [0.5, 0.5]}, {"x": 2, "scores": [0.45, 0.6]}]


def figures_of(path):
    return {**json.loads(path.read_text(encoding="utf-8")), "load_average": 0}


class Trainer:
    """Replaces the processes: records the jobs and writes the files of job.main."""

    # Exposures with a wrong logit, of twenty, by model. GRM is best and DCN-V2 the best baseline.
    WRONG = {"grm": 0, "dcn": 4, "din": 8, "dlrm": 10}

    def __init__(self):
        self.jobs = []

    def __call__(self, given):
        for one in given:
            if one.finished:
                continue
            one.folder.mkdir(parents=True)
            experiment, patience = one.request["experiment"], one.request["patience"]
            model, dropout = experiment["model"]["kind"], experiment["model"]["dropout"]
            self.jobs.append((model, bool(patience), dropout, experiment["train"]["epochs"], experiment["seed"]))
            epochs = experiment["train"]["epochs"]
            scores = [0.8 if dropout == 0.3 and epoch == 1 else 0.6 for epoch in range(epochs)]
            names = one.request["deciding"]
            held_out = [dict.fromkeys(names, 1 - self.WRONG[model] / 20)] * epochs
            entries = [
                {
                    "epoch": n + 1, "score": value, "held_out": of, "processor_seconds": 1.0,
                    "forward_mflops": experiment["model"]["dim"],
                }
                for n, (value, of) in enumerate(zip(scores, held_out))
            ]  # fmt: skip
            shown = summary.rates_samples(
                data_sets.DATA_SETS[0].experiment(model).model, pathlib.Path(one.request["data"]), 10.0
            )
            for task in data_sets.DATA_SETS[0].tasks:
                logit = np.where(shown[f"{task}_label"] > 0, 1.0, -1.0)
                wrong = 7 * np.arange(len(logit)) % 20 < self.WRONG[model]
                shown[f"{task}_logit"] = np.where(wrong, -logit, logit)
            np.savez(one.folder / SAMPLES, **shown)
            (one.folder / training.RESULT).write_text(json.dumps(entries), encoding="utf-8")


def test_the_validation_split_alone_chooses_and_finished_jobs_stay(source, tmp_path, monkeypatch, capsys):
    trainer = Trainer()
    monkeypatch.setattr(training, "train", trainer)
    monkeypatch.setattr(benchmark, "GRID", {"model.dropout": (0.1, 0.3)})
    monkeypatch.setattr(benchmark, "WHOLE", benchmark.Budget(settings=2, epochs=3, patience=2, seeds=(0, 1)))
    monkeypatch.setattr(summary, "RESAMPLES", 20)
    given = ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    benchmark.main(given)
    assert sorted(trainer.jobs) == sorted(
        [(model, True, dropout, 3, seed) for model in data_sets.MODELS for dropout in (0.1, 0.3) for seed in (0, 1)]
        + [(model, False, 0.3, 2, seed) for model in data_sets.MODELS for seed in (0, 1)]
    )
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    for name in data_sets.MODELS:
        chosen = result["models"][name]
        assert (chosen["setting"], chosen["epochs"], chosen["score"]) == ({"model.dropout": 0.3}, 2, 0.8)
        assert [one["scores"] for one in chosen["tried"]] == [[0.6] * 3, [0.6, 0.8, 0.6]]
        assert chosen["test"]["ctr_auc"]["seeds"] == [1 - Trainer.WRONG[name] / 20] * 2
    assert (result["auc_grm"], result["gauc_dcn"], result["second_auc_din"]) == (1.0, 0.8, 0.6)
    assert len(result["models"]["rates"]["tried"]) == 2 and 0 < result["gauc_rates"] < 1
    assert result["gauc_best_baseline"] == result["second_auc_best_baseline"] == "dcn"
    assert 0 < result["auc_difference_low"] <= result["auc_difference"] <= result["auc_difference_high"]
    assert set(result["differences"]) == {"dlrm", "din", "dcn", "rates"}
    assert "dcn" in capsys.readouterr().out
    benchmark.main(given)
    assert len(trainer.jobs) == 24, "a finished job is not trained again"
    assert figures_of(tmp_path / "r.json") == {**result, "load_average": 0}
    benchmark.main([*given, "--settings", "1"])
    assert sorted(trainer.jobs[24:]) == sorted(
        (model, False, 0.1, 1, seed) for model in data_sets.MODELS for seed in (0, 1)
    )
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["settings"] == 1


def test_sizes_of_grm_and_dlrm(source, tmp_path, monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr(training, "train", trainer)
    given = ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json"), "--sizes"]
    benchmark.main([*given, "--quick"])
    assert sorted(trainer.jobs) == sorted([(model, False, 0.1, 1, 0) for model in ("grm", "dlrm")] * 2)
    entries = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["sizes"]
    assert [(one["model"], one["size"], one["forward_mflops"]) for one in entries] == [
        ("grm", 1, 16), ("grm", 2, 32), ("dlrm", 1, 16), ("dlrm", 2, 32),
    ]  # fmt: skip
    assert [one["gauc"] for one in entries] == [1.0, 1.0, 0.5, 0.5]
    trainer.jobs.clear()
    monkeypatch.setattr(benchmark, "WHOLE", benchmark.Budget(settings=2, epochs=3, patience=2, seeds=(0, 1)))
    monkeypatch.setattr(benchmark, "GRID", {"model.dropout": (0.3,)})
    benchmark.main(given)
    kinds = [(model, True, 0.3, 3, 0) for model in ("grm", "dlrm")] * 4
    kinds += [(model, False, 0.3, 2, seed) for model in ("grm", "dlrm") for seed in (0, 1)] * 4
    assert sorted(trainer.jobs) == sorted(kinds), "the validation split chose two epochs"
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert result["benchmark"] == "ranking_sizes" and [one["size"] for one in result["sizes"]] == [1, 2, 3, 4] * 2
    assert result["sizes"][0]["epochs"] == 2 and result["sizes"][0]["gauc_seeds"] == [1.0, 1.0]


def test_differences_are_of_means_over_seeds_and_draw_users():
    """Users have an AUC of 1 or 0. Half of the users change sides between the models."""
    users = 40

    def samples(wrong):
        user, label = np.repeat(np.arange(users), 2), np.tile([0.0, 1.0], users)
        logit = np.where(np.isin(user, np.flatnonzero(wrong)), -label, label)
        return {"user": user, "a_label": label, "a_logit": logit}

    odd, none = np.arange(users) % 2 == 1, np.zeros(users, bool)
    same = summary.differences({"grm": [samples(odd)] * 2, "x": [samples(odd)]}, ["a_gauc"], 20)["x"]["a_gauc"]
    assert same == {"difference": 0, "low": 0, "high": 0}, "the draws are the same for all models"
    found = summary.differences({"grm": [samples(none)] * 2, "x": [samples(odd), samples(none)]}, ["a_gauc"], 400)
    row = found["x"]["a_gauc"]
    assert row["difference"] == 0.25  # the mean of 0.5 and 0
    half = 1.96 * 0.25 / np.sqrt(users)  # the other seed adds no users
    assert row["low"] == pytest.approx(0.25 - half, abs=0.2 * half)
    assert row["high"] == pytest.approx(0.25 + half, abs=0.2 * half)
    with pytest.raises(ValueError, match="evaluated on different samples"):
        summary.differences({"grm": [samples(none)], "x": [{**samples(none), "a_label": np.ones(80)}]}, ["a_gauc"], 1)


@pytest.mark.nightly
def test_both_tables_train_the_same_model(source, tmp_path):
    pytest.importorskip("tensorflow_recommenders_addons", reason="TFRA is not installed")
    data = data_sets.data_set_of(source)
    folder = data.prepared(source, tmp_path)["test"]
    experiment = data.experiment("grm", ["train.epochs=2"]).to_dict()
    native, tfra = [convergence.train(experiment, backend, 1, str(folder)) for backend in ("native", "tfra")]
    assert [point["step"] for point in native] == [point["step"] for point in tfra] == list(range(len(native)))
    assert len(native) > 2
    assert native[-1]["loss"] != native[0]["loss"], "the model trained"
    for one, other in zip(native, tfra):
        # Sums of float32 in another order, over a few steps.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def _answers(changed):
    """Returns a stand-in of processes.ask: GAUC and AUC rise by 0.1 per point, and `changed` adds to one backend."""

    def ask(function, *, experiment, backend, every, data):
        assert function is convergence.train and every == 1
        add = changed.get((backend, experiment["seed"]), lambda point: 0.0)
        names = [f"{task}_{metric}" for task in ("ctr", "long_view") for metric in ("gauc", "auc")]
        return [{"step": point, **{name: 0.5 + 0.1 * point + add(point) for name in names}} for point in range(3)]

    return ask


def test_the_largest_difference_at_any_point_is_reported(source, tmp_path, monkeypatch, capsys):
    changed = {("tfra", 0): lambda point: 0.01 * (point == 1), ("native", 1): lambda point: 0.02 * point}
    monkeypatch.setattr(processes, "ask", _answers(changed))
    given = ["--data", str(source), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "r.json")]
    convergence.main(given)
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert result["gauc_difference"] == result["second_auc_difference"] == pytest.approx(0.01)
    assert result["auc_difference_seeds"] == pytest.approx(0.04)
    assert result["gauc"] == pytest.approx({"native": 0.7, "tfra": 0.7}) and result["steps"] == 2
    assert [(one["backend"], one["seed"]) for one in result["curves"]] == [("native", 0), ("tfra", 0), ("native", 1)]
    assert "between two seeds 0.04" in capsys.readouterr().out
    convergence.main([*given, "--quick"])
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert "gauc_difference_seeds" not in result and len(result["curves"]) == 2


def test_tables_that_begin_otherwise_are_no_comparison(source, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ask", _answers({("tfra", 0): lambda point: 0.01 * (point == 0)}))
    with pytest.raises(harness.CheckFailed, match="ctr_gauc before the first step"):
        convergence.main(["--data", str(source), "--run", str(tmp_path)])
