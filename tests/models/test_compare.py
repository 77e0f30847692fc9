"""compare: metrics of drawn users equal repeated rows, and the interval has a known width; refusals."""

import json

import numpy as np
import pytest

from tests.oracles.metrics import auc_oracle, gauc_oracle
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
    compare.main([*map(str, runs), "--resamples", "50", "--json", str(tmp_path / "same.json")])
    facts = json.loads((tmp_path / "same.json").read_text(encoding="utf-8"))
    assert facts["users"] == 30 and all(row["low"] == row["high"] == 0 for row in facts["metrics"].values())
    assert "*" not in capsys.readouterr().out.splitlines()[-1]
    better = ranking_run(tmp_path / "c", 3.0, seed=4)
    compare.main([str(runs[0]), str(better), "--resamples", "50"])
    line = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ctr_auc")]
    assert line[0].endswith("*")


def test_runs_that_make_no_pairs_are_refused(tmp_path):
    a = ranking_run(tmp_path / "a", 0.5)
    with pytest.raises(SystemExit, match="has no samples.npz"):
        compare.main([str(a), str(tmp_path)])
    with pytest.raises(SystemExit, match="RUN_A and RUN_B are of different tasks"):
        compare.main([str(a), str(retrieval_run(tmp_path / "r", np.arange(1, 5)))])
    with pytest.raises(SystemExit, match="evaluated on different samples: 'user' differs"):
        compare.main([str(a), str(ranking_run(tmp_path / "b", 0.5, users=29))])
    with pytest.raises(SystemExit, match="--resamples must be >= 0"):
        compare.main([str(a), str(a), "--level", "1"])


def test_no_users_and_one_user():
    nobody = {"user": np.array([], np.int64), "rank": np.array([], np.int64)}
    assert np.isnan(compare.compare(nobody, nobody, 5, 0, 0.9)["mrr"]["low"])
    one = {"user": np.array([3]), "rank": np.array([2])}
    assert compare.compare(one, one, 5, 0, 0.9)["mrr"] == {"a": 0.5, "b": 0.5, "difference": 0, "low": 0, "high": 0}
