"""compare: metrics of drawn users equal repeated rows, and the interval has a known width; refusals."""

import json
import re

import numpy as np
import pytest

from tests.models.test_report import Page
from tests.oracles.metrics import auc_oracle, gauc_oracle
from tf_fusedrec.cli.main import main
from tf_fusedrec.models import compare


def ranking_run(folder, signal, seed=0, order_seed=0, users=30):
    """Returns predictions with `signal` about the labels, with rows in a random order."""
    rng = np.random.default_rng(0)
    user = np.sort(rng.integers(10, 10 + users, 400))
    label = rng.integers(0, 2, 400).astype(np.float64)
    logit = np.round(np.random.default_rng(seed).normal(size=400) + signal * label, 1)
    arrays = {
        "user": user, "item": np.arange(400), "time": np.arange(400), "ctr_label": label, "ctr_logit": logit,
    }  # fmt: skip
    order = np.random.default_rng(order_seed).permutation(400)
    folder.mkdir(exist_ok=True)
    np.savez(folder / compare.SAMPLES, **{name: values[order] for name, values in arrays.items()})
    return folder


def retrieval_run(folder, ranks):
    folder.mkdir(exist_ok=True)
    np.savez(folder / compare.SAMPLES, user=np.arange(len(ranks)), rank=ranks)
    return folder


def test_metrics_of_drawn_users_are_those_of_their_rows_repeated(tmp_path):
    samples = compare.read_samples(ranking_run(tmp_path / "a", 0.7, order_seed=5))
    names = np.unique(samples["user"])
    times = np.random.default_rng(1).integers(0, 3, len(names))
    rows, groups = [], []
    for copy in range(2):
        for number in np.flatnonzero(times > copy):
            mine = np.flatnonzero(samples["user"] == names[number])
            rows.append(mine)
            groups.append(np.full(len(mine), 1000 * copy + number))
    rows, groups = np.concatenate(rows), np.concatenate(groups)
    label, logit = samples["ctr_label"][rows], samples["ctr_logit"][rows]
    rate = label.mean()
    expected = {
        "ctr_auc": auc_oracle(label, logit),
        "ctr_gauc": gauc_oracle(groups, label, logit, "none"),
        "ctr_ne": np.mean(np.log1p(np.exp(logit)) - label * logit) / np.log(1 / rate**rate / (1 - rate) ** (1 - rate)),
    }
    drawn = {name: metric(times) for name, metric in compare.metrics_of(samples).items()}
    assert drawn == pytest.approx(expected, rel=1e-12)


def test_the_interval_of_a_difference_of_means_is_the_normal_one(tmp_path):
    """The difference of two runs in HR@10 over 2,000 users is a mean with a known standard error."""
    rng = np.random.default_rng(3)
    hit_a, hit_b = rng.random(2000) < 0.3, rng.random(2000) < 0.35
    a, b = (retrieval_run(tmp_path / name, np.where(hit, 5, 500)) for name, hit in (("a", hit_a), ("b", hit_b)))
    table = compare.compare(compare.read_samples(a), compare.read_samples(b), 2000, 0, 0.95)
    difference = hit_b.astype(float) - hit_a
    half = 1.96 * difference.std() / np.sqrt(2000)
    row = table["hr@10"]
    assert row["difference"] == pytest.approx(difference.mean())
    # The ends of a percentile interval from 2,000 draws are accurate to about a tenth of its half width.
    assert row["low"] == pytest.approx(difference.mean() - half, abs=0.1 * half)
    assert row["high"] == pytest.approx(difference.mean() + half, abs=0.1 * half)
    assert table["mrr"]["a"] == pytest.approx(np.mean(np.where(hit_a, 1 / 5, 1 / 500)))


def test_the_normalized_entropy_divides_by_the_entropy_of_the_same_draw():
    rng = np.random.default_rng(2)
    user, entropy, baseline = np.arange(50), rng.random(50) + 1, rng.random(50) + 2
    samples = {"user": user, "rank": np.ones(50, np.int64), "entropy": entropy, "baseline_entropy": baseline}
    times = rng.integers(0, 3, 50)
    rows = np.repeat(user, times)
    assert compare.metrics_of(samples)["ne"](times) == pytest.approx(entropy[rows].sum() / baseline[rows].sum())
    better = {**samples, "entropy": entropy - 0.1}
    row = compare.compare(samples, better, 100, 0, 0.95)["ne"]
    assert row["difference"] == pytest.approx(-5 / baseline.sum()) and row["high"] < 0


def test_pairs_do_not_depend_on_the_order_of_rows_and_the_table_tells(tmp_path, capsys):
    runs = [ranking_run(tmp_path / "a", 0.5), ranking_run(tmp_path / "b", 0.5, order_seed=9)]
    assert main(["compare", *map(str, runs), "--resamples", "50", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["users"] == 30 and all(row["low"] == row["high"] == 0 for row in facts["metrics"]["b"].values())
    better = ranking_run(tmp_path / "c", 3.0, seed=4)
    assert main(["compare", *map(str, runs), str(better), "--resamples", "50"]) == 0
    same, other = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ctr_auc")]
    assert same.endswith("+0.0000 to +0.0000") and other.endswith("  better")


def test_settings_data_and_code_that_differ_are_told(tmp_path, capsys):
    runs = [ranking_run(tmp_path / name, 0.5) for name in ("a", "b")]
    for run, epochs, commit in zip(runs, (1, 3), ("0123456789", "fedcba9876")):
        record = {
            "state": "done", "seconds": 39.0 * epochs, "ranks": 2, "versions": {"numpy": "1"},
            "labels": {"ctr": "click"},
            "experiment": {"name": "x", "train": {"epochs": epochs, "patience": 0}, "data": {"cache": str(run)}},
            "data": {"fingerprint": "1234"}, "code": {"commit": commit, "changed_files": epochs - 1},
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert main(["compare", *map(str, runs), "--resamples", "10"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train.epochs", "1", "3"] in lines and ["time", "39", "s", "1:57"] in lines
    assert ["code", "012345678", "fedcba987", "+", "2", "changed", "files"] in lines
    assert ["(5", "other", "settings", "and", "facts", "are", "equal)"] in lines  # name, patience, data, ranks, numpy
    assert [words for words in lines if words[:2] == ["click", "AUC"]]


def test_the_page_of_a_comparison_has_the_curves_of_all_runs_and_what_the_text_has(tmp_path, capsys):
    runs = [
        ranking_run(tmp_path / name, signal, seed) for seed, (name, signal) in enumerate(zip("abc", (0.2, 2.0, 1.0)))
    ]
    for number, run in enumerate(runs):
        epochs = [{"epoch": epoch, "loss": 1.0 / epoch, "val_ctr_auc": 0.5 + number / 10} for epoch in (1, 2)]
        record = {
            "state": "done", "seconds": 1.0, "ranks": 1, "versions": {}, "labels": {"ctr": "<click>"}, "epochs": epochs,
            "experiment": {"train": {"epochs": number}}, "data": {"fingerprint": "1"}, "code": {},
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    page = tmp_path / "compared.html"
    assert main(["compare", *map(str, runs), "--resamples", "50", "--html", str(page)]) == 0
    shown, parsed = capsys.readouterr().out, Page(page.read_text(encoding="utf-8"))
    assert shown.endswith(f"\npage  {page}\n") and parsed.open == []
    plots = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert [plot["aria-label"] for plot in plots] == ["loss by epoch", "<click> AUC by epoch"]
    assert [page.read_text(encoding="utf-8").count(f"<path class={color}") for color in "abc"] == [2, 2, 2]
    for words in ("train.epochs", "<click> GAUC", "better", *re.findall(r"[+-]\d\.\d{4} to [+-]\d\.\d{4}", shown)):
        assert words in parsed.text
    assert main(["compare", *map(str, runs), "--html", str(tmp_path / "none/page.html")]) == 1
    assert "error: --html cannot be written: [Errno 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "low", "high", "word"),
    [("auc", 0.1, 0.2, "better"), ("ctr_ne", 0.1, 0.2, "worse"), ("ne", -0.2, -0.1, "better"), ("mrr", -0.1, 0.1, "")],
)
def test_a_smaller_entropy_is_better(metric, low, high, word):
    assert compare.verdict(metric, {"low": low, "high": high}) == word


def test_the_baseline_of_a_run_is_compared_on_the_samples_of_the_model(tmp_path):
    samples = compare.read_samples(ranking_run(tmp_path / "a", 2.0))
    noise = np.random.default_rng(5).normal(size=400)
    table = compare.against_baseline({**samples, "baseline_ctr": noise})
    assert set(table) == {"ctr_auc", "ctr_gauc"} and table["ctr_auc"]["low"] > 0.1
    assert table["ctr_auc"]["a"] == pytest.approx(auc_oracle(samples["ctr_label"], noise))
    ranks = {"user": np.arange(50), "rank": np.full(50, 5), "baseline_rank": np.full(50, 20)}
    assert compare.against_baseline(ranks)["hr@10"] == {"a": 0, "b": 1, "difference": 1, "low": 1, "high": 1}


def test_runs_that_make_no_pairs_are_refused(tmp_path, capsys):
    a = ranking_run(tmp_path / "a", 0.5)

    def refused(message, *words):
        assert main(["compare", *map(str, words)]) == 1
        assert re.match(f"error: .*{message}", capsys.readouterr().err)

    refused("has no run.json. Pass a folder of", a, tmp_path)
    refused("two of the runs are of different tasks", a, retrieval_run(tmp_path / "r", np.arange(1, 5)))
    refused("evaluated on different samples: 'user' differs", a, ranking_run(tmp_path / "b", 0.5, users=29))
    refused("--resamples must be at least 0", a, a, "--level", "1")
    refused("RUN must name 2 to 26 runs, got 1", a)


def test_no_users_and_one_user():
    nobody = {"user": np.array([], np.int64), "rank": np.array([], np.int64)}
    assert np.isnan(compare.compare(nobody, nobody, 5, 0, 0.9)["mrr"]["low"])
    one = {"user": np.array([3]), "rank": np.array([2])}
    assert compare.compare(one, one, 5, 0, 0.9)["mrr"] == {"a": 0.5, "b": 0.5, "difference": 0, "low": 0, "high": 0}
