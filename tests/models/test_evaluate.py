"""Evaluation equals results by hand on a small data set; the command refuses wrong arguments."""

import json
import re

import numpy as np
import pytest

from tests.models import experiments
from tf_fusedrec import checkpoint, keras, tf
from tf_fusedrec.cli.main import main as program
from tf_fusedrec.data.rows import Ragged, Rows, splits_of
from tf_fusedrec.metrics import exact
from tf_fusedrec.models import baselines
from tf_fusedrec.models.baselines import PRIOR_EXPOSURES
from tf_fusedrec.models.build import make_embedding, make_model
from tf_fusedrec.models.data_sets.layouts import write_dataset
from tf_fusedrec.models.evaluate import entropy_of_target, evaluate, evaluator, table
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.export import saved_experiment
from tf_fusedrec.models.prepare import prepare_data


def listed(rows, dtype=np.int64):
    return Ragged(np.array(sum(rows, []), dtype), splits_of(np.array([len(row) for row in rows])))


def ranking_rows(exposed, click, conversion):
    users = len(exposed)
    empty = [[] for _ in range(users)]
    times = [[1000 + n for n in range(len(row))] for row in exposed]
    return Rows(
        {
            "user_id": np.arange(1, users + 1),
            "user_budget": np.zeros(users, np.int64),
            "history_item": listed(empty),
            "history_action": listed(empty),
            "history_time": listed(empty),
            "exposed_item": listed(exposed),
            "exposed_time": listed(times),
            "exposed_click": listed(click, np.float32),
            "exposed_conversion": listed(conversion, np.float32),
        },
        users,
    )


@pytest.mark.slow
def test_ranking_baseline_adds_the_log_odds_of_user_and_item(tmp_path):
    train = ranking_rows([[1, 4], [1, 7]], [[1, 0], [1, 0]], [[1, 0], [0, 0]])
    test = ranking_rows([[4, 1, 2], [7, 1]], [[0, 0, 1], [1, 0]], [[0, 0, 1], [0, 0]])
    write_dataset(
        tmp_path / "data", task="ranking", source="hand", split="hand", users=2, train=train, test=test,
        item_ids=np.array([1, 2, 4, 7]), train_items=np.array([1, 4, 1, 7]),
    )  # fmt: skip
    experiment = from_dict(experiments.RANKING)
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    results, samples = evaluate(experiment, model, tmp_path / "data")

    def log_odds(positives, shown, mean):
        rate = (positives + PRIOR_EXPOSURES * mean) / (shown + PRIOR_EXPOSURES)
        return np.log(rate / (1 - rate))

    of_item = {1: log_odds(2, 2, 0.5), 4: log_odds(0, 1, 0.5), 7: log_odds(0, 1, 0.5), 2: log_odds(0, 0, 0.5)}
    of_user = [log_odds(1, 2, 0.5)] * 3 + [log_odds(1, 2, 0.5)] * 2
    scores = [of_item[item] + user for item, user in zip((4, 1, 2, 7, 1), of_user)]
    labels = [0, 0, 1, 1, 0]
    pairs = [
        (p > n) + 0.5 * (p == n)
        for p, positive in zip(scores, labels)
        for n, negative in zip(scores, labels)
        if positive and not negative
    ]
    assert results["exposures"] == 5
    assert results["baseline_ctr_auc"] == pytest.approx(np.mean(pairs))
    # User 1: item 2 is ahead of 4 and behind 1. User 2: item 7 is behind item 1.
    assert results["baseline_ctr_gauc"] == pytest.approx((0.5 + 0.0) / 2)
    # User 2 has no conversion, hence no AUC. Conversion rates order user 1's items 1, 2, 4 as click rates do.
    assert results["baseline_ctcvr_gauc"] == pytest.approx(0.5)
    # tf_fusedrec.models.compare pairs two runs by one entry per exposure.
    assert samples["user"].tolist() == [1, 1, 1, 2, 2] and samples["item"].tolist() == [4, 1, 2, 7, 1]
    assert samples["ctr_label"].tolist() == labels and samples["ctcvr_label"].tolist() == [0, 0, 1, 0, 0]
    logit = samples["ctr_logit"]
    entropy = np.mean(np.log1p(np.exp(logit)) - labels * logit)
    assert results["ctr_ne"] == pytest.approx(entropy / (-0.4 * np.log(0.4) - 0.6 * np.log(0.6)))
    assert results["ctr_calibration"] == pytest.approx(np.sum(1 / (1 + np.exp(-logit))) / 2)


@pytest.mark.slow
def test_retrieval_baseline_ranks_by_popularity_without_what_was_seen(tmp_path):
    items_of, times = [[1, 2], [3]], [[10, 20], [30]]
    train = {"user_id": np.array([1, 2]), "item_id": listed(items_of), "timestamp": listed(times)}
    test = {**train, "target_item": np.array([3, 4]), "target_timestamp": np.array([40, 50])}
    for name, train_items in (("data", [1, 1, 1, 2, 2, 3]), ("other", [4, 4, 3])):
        write_dataset(
            tmp_path / name, task="retrieval", source="hand", split="hand", users=2, train=Rows(train, 2),
            test=Rows(test, 2), item_ids=np.array([1, 2, 3, 4]), train_items=np.array(train_items),
        )  # fmt: skip
    # Two tokens make a batch of each user.
    experiment = from_dict({**experiments.RETRIEVAL, "evaluate": {"cutoffs": [1, 3], "target_tokens_per_rank": 2}})
    model = make_model(experiment, make_embedding(experiment), np.array([1, 2, 3, 4]), np.ones(4, np.int64))
    results, samples = evaluate(experiment, model, tmp_path / "data")
    # User 1 has seen 1 and 2, so 3 is first. User 2 has seen 3, so 4 comes after 1 and 2.
    assert results["baseline_mrr"] == pytest.approx((1 + 1 / 3) / 2)
    assert (results["baseline_hr@1"], results["baseline_hr@3"]) == (0.5, 1.0)
    assert results["baseline_ndcg@3"] == pytest.approx((1 + 1 / np.log2(4)) / 2)
    assert results["users"] == 2
    assert samples["user"].tolist() == [1, 2] and samples["rank"].shape == (2,)
    assert 0.25 <= results["mrr"] <= 1.0
    # Items have 3, 2, 1 and 0 training interactions; each counts one more.
    np.testing.assert_allclose(samples["baseline_entropy"], -np.log([2 / 10, 1 / 10]))
    items = model.embed_items(np.array([1, 2, 3, 4])).numpy().astype(np.float64)
    histories, moments = (tf.ragged.constant(lists, dtype=tf.int64) for lists in (items_of, times))
    users = model.embed_users(histories, moments, tf.constant([40, 50], tf.int64)).numpy().astype(np.float64)
    logits = users @ items.T / experiment.model.temperature
    entropy = np.log(np.exp(logits).sum(axis=1)) - logits[[0, 1], [2, 3]]
    # Products in float32 are right to 1e-6, and a temperature of 0.05 makes 2e-5 of it. An entropy may be near 0.
    np.testing.assert_allclose(samples["entropy"], entropy, rtol=0, atol=1e-4)
    assert results["ne"] == pytest.approx(entropy.sum() / -np.log(0.02), abs=1e-4)
    # Another evaluation of the same evaluator sees the model as it is then, and does not trace it again.
    evaluate_again = evaluator(experiment, model)
    first = evaluate_again(tmp_path / "data").results
    for weight in model.trainable_variables:
        weight.assign(weight + 0.5)
    second = evaluate_again(tmp_path / "data").results
    assert first == results and second["ne"] != first["ne"]
    assert {name for name in first if second[name] == first[name]} >= {name for name in first if "baseline" in name}
    # In the other data, user 1's target 3 is behind 4, and user 2's target 4 is first.
    assert evaluate_again(tmp_path / "other").results["baseline_mrr"] == pytest.approx((1 / 2 + 1) / 2)


def test_targets_outside_the_catalogue_are_left_out_of_the_entropy():
    entropy = entropy_of_target(np.eye(2), np.eye(2), np.array([5, 7]), np.array([5, 6]), 1.0)
    assert entropy[0] == pytest.approx(np.log(1 + np.exp(-1))) and np.isnan(entropy[1])
    baseline = baselines.popularity_entropy(np.array([1, 0]), np.array([5, 7]), np.array([5, 6]))
    assert baseline[0] == pytest.approx(-np.log(2 / 3)) and np.isnan(baseline[1])
    assert exact.entropy_ratio(entropy, baseline) == pytest.approx(entropy[0] / baseline[0])
    assert np.isnan(exact.entropy_ratio(entropy[1:], baseline[1:]))


def saved(folder, model, **embedding):
    """Saves a model's checkpoint like the main job."""
    fields = from_dict(experiments.RETRIEVAL).to_dict()
    extra = {"experiment": {**fields, "embedding": {**fields["embedding"], **embedding}}, "items": 20}
    checkpoint.save(folder, model, extra=extra)


def untrained():
    experiment = from_dict(experiments.RETRIEVAL)
    return make_model(experiment, make_embedding(experiment), np.arange(1, 21), np.ones(20, np.int64))


@pytest.mark.slow
def test_the_command_takes_a_run_or_a_checkpoint_and_other_data(tmp_path, capsys):
    data, model = prepare_data(from_dict(experiments.RETRIEVAL), tmp_path / "data"), untrained()
    results = evaluate(from_dict(experiments.RETRIEVAL), model, data).results
    saved(tmp_path / "run" / "checkpoint", model, groups=2)  # Replicas trained it, but one process has no replicas.
    for run, further in (("run", []), ("run/checkpoint", []), ("run", ["--data", str(data)])):
        assert program(["evaluate", str(tmp_path / run), "--json", *further]) == 0
        test = json.loads(capsys.readouterr().out)["test"]
        assert test == pytest.approx(results, rel=1e-6)  # Rows, weights and processes are the same.
    assert program(["evaluate", str(tmp_path / "run")]) == 0
    line = f"{'HR@10':<14}{results['hr@10']:>10.4f}{results['baseline_hr@10']:>10.4f}"
    assert line in capsys.readouterr().out.splitlines()
    assert saved_experiment(tmp_path / "run" / "checkpoint").embedding.groups == 1


def test_metrics_without_a_value_have_their_line():
    # Without a user of both classes there is no GAUC.
    assert table({"users": 3.0, "gauc": float("nan"), "baseline_gauc": 0.5}, {}).splitlines()[1:] == [
        f"{'users':<14}{'3':>10}", f"{'GAUC':<14}{'nan':>10}{'0.5000':>10}",
    ]  # fmt: skip


def test_columns_stand_below_each_other_under_the_names_of_the_user():
    results = {"other_profile_enter_ne": 0.5, "ctr_auc": 0.25, "baseline_ctr_auc": 0.5, "ctcvr_auc": 0.125}
    lines = table(results, {"ctr": "like", "ctcvr": "like"}).splitlines()
    assert {line.index(value) + len(value) for line, value in zip(lines, ("test", "0.5000", "0.2500"))} == {34}
    assert lines[2].split() == ["like", "AUC", "0.2500", "0.5000"] and len(lines[0]) == len(lines[2]) and not lines[3:]


def test_runs_that_cannot_be_evaluated_are_one_line(tmp_path, capsys):
    run = tmp_path / "run"

    def refused(message, *arguments):
        assert program(["evaluate", *map(str, arguments or [run])]) == 1
        assert re.search(f"^error: {message}", capsys.readouterr().err, re.MULTILINE)

    refused("RUN: no such folder: .*/run. Name the output folder of fusedrec train.")
    run.mkdir()
    refused("--data: no such file or folder: nowhere.csv.", run, "--data", "nowhere.csv")
    refused("folder must hold a checkpoint, but .*run/manifest.json is missing")
    data = prepare_data(from_dict(experiments.RETRIEVAL), run / "data")
    saved(run / "checkpoint", untrained())
    facts = json.loads((data / "dataset.json").read_text(encoding="utf-8"))
    (data / "dataset.json").write_text(json.dumps({**facts, "task": "ranking"}), encoding="utf-8")
    refused("/.* holds ranking data, but the experiment's task is 'retrieval'", run, "--data", data)
    unknown, other = tmp_path / "unknown", tmp_path / "other"
    saved(unknown, untrained(), optimizer="lion")
    refused("checkpoint .* holds an experiment that this version does not know: embedding.optimizer", unknown)
    keras_model = keras.Sequential([keras.layers.Dense(1, input_shape=[1])])
    checkpoint.save(other, keras_model, layers=[make_embedding(from_dict(experiments.RETRIEVAL))])
    refused("checkpoint .* names no experiment, so another program than .fusedrec train. wrote it", other)
