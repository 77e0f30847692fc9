"""Compares two runs: every metric of both, their difference and its confidence interval, and their settings.

A run's samples.npz holds the data behind the metrics, by exposure or by user. A paired bootstrap gives the interval: it
draws the same users with replacement for both runs and takes percentiles of the difference. It draws users, because
exposures of one user are not independent. Both runs must have been evaluated on the same exposures or users.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.metrics import exact
from tf_fusedrec.models import page, screen

SAMPLES = "samples.npz"
CUTOFFS = (10, 50, 200)
_PLACES = ("data.cache", "data.input")  # settings that change no result
_DRAWN = 20_000_000  # samples to draw in all for a comparison with the baseline, a few seconds
_KEYS = ("user", "item", "time")
# Computes a metric of a run from `times` <int64>[users], the number of draws of each user.
Metric = Callable[[np.ndarray], float]


def read_samples(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a run, in an order that does not depend on its number of ranks.

    Raises:
      ValueError: The folder has no samples.npz.
    """
    path = run / SAMPLES
    if not path.is_file():
        raise ValueError(f"{run} has no {SAMPLES}. Pass the output folder of a finished `fusedrec train`.")
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    order = np.lexsort([arrays[name] for name in reversed(_KEYS) if name in arrays])
    return {name: values[order] for name, values in arrays.items()}


def check_pairs(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError unless both runs were evaluated on the same exposures or users."""
    known = [name for name in a if name in _KEYS or name.endswith("_label")]
    if ("rank" in a) != ("rank" in b):
        raise ValueError(
            "two of the runs are of different tasks: one ranks exposures, the other retrieves items. Pass runs of one "
            "task."
        )
    for name in known:
        if name.endswith("_label") and name not in b:
            continue  # Only one of the runs has this task.
        if not np.array_equal(a[name], b[name]):
            raise ValueError(
                f"two of the runs were evaluated on different samples: {name!r} differs ({len(a[name])} and "
                f"{len(b[name])} entries). Evaluate both on the same test split."
            )


def metrics_of(samples: Mapping[str, np.ndarray]) -> dict[str, Metric]:
    """Returns each metric by name, as a function of the number of draws of each user in ascending order."""
    _, user = np.unique(samples["user"], return_inverse=True)
    if "rank" in samples:
        return {**_of_ranks(samples["rank"], user), **_of_entropies(samples, user)}
    tasks = [name.removesuffix("_logit") for name in samples if name.endswith("_logit")]
    return {
        f"{task}_{name}": metric
        for task in tasks
        for name, metric in _of_logits(samples[f"{task}_label"], samples[f"{task}_logit"], user).items()
    }


def compare(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], resamples: int, seed: int, level: float
) -> dict[str, dict[str, float]]:
    """Returns a, b, difference (b - a), low and high of its interval, for every metric that both runs have.

    Args:
      a, b: Results of read_samples.
      resamples: Number of bootstrap draws. 0 gives nan as the interval.
      seed: Seed of the draws.
      level: Share of the draws inside the interval, in (0, 1).
    """
    check_pairs(a, b)
    metrics_a, metrics_b = metrics_of(a), metrics_of(b)
    names = [name for name in metrics_a if name in metrics_b]
    users = len(np.unique(a["user"]))
    generator = np.random.default_rng(seed)
    drawn = np.full([resamples, len(names)], np.nan)
    for number in range(resamples if users else 0):
        times = np.bincount(generator.integers(0, users, users), minlength=users)
        drawn[number] = [metrics_b[name](times) - metrics_a[name](times) for name in names]
    everyone = np.ones(users, np.int64)
    table = {}
    for column, name in enumerate(names):
        value_a, value_b = metrics_a[name](everyone), metrics_b[name](everyone)
        # A draw with one class only leaves the metric undefined and is skipped.
        valid = drawn[~np.isnan(drawn[:, column]), column]
        tail = (1 - level) / 2
        low, high = np.quantile(valid, [tail, 1 - tail]) if len(valid) else (np.nan, np.nan)
        table[name] = {
            "a": value_a, "b": value_b, "difference": value_b - value_a, "low": float(low), "high": float(high),
        }  # fmt: skip
    return table


def against_baseline(samples: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, dict[str, float]]:
    """Returns a (the baseline's), b (the model's), difference, low and high for metrics of a run that rank.

    Args:
      samples: Samples of an evaluation.
      seed: Seed of the draws.
    """
    order = {name: samples[name] for name in _KEYS if name in samples}
    if "rank" in samples:
        baseline, model = ({**order, "rank": samples[name]} for name in ("baseline_rank", "rank"))
    else:
        labels = {name: values for name, values in samples.items() if name.endswith("_label")}
        tasks = [name.removesuffix("_label") for name in labels]
        baseline, model = (
            {**order, **labels, **{f"{task}_logit": samples[name.format(task)] for task in tasks}}
            for name in ("baseline_{}", "{}_logit")
        )
    resamples = int(np.clip(_DRAWN // max(len(samples["user"]), 1), 100, 400))
    table = compare(baseline, model, resamples, seed, 0.95)
    return {name: row for name, row in table.items() if not name.endswith("_ne")}  # the baseline is no probability


def _of_ranks(ranks: np.ndarray, user: np.ndarray) -> dict[str, Metric]:
    gains = {f"hr@{k}": np.where(ranks <= k, 1.0, 0.0) for k in CUTOFFS}
    gains |= {f"ndcg@{k}": np.where(ranks <= k, 1 / np.log2(ranks + 1.0), 0.0) for k in CUTOFFS}
    gains["mrr"] = 1.0 / ranks

    def mean_of(gain: np.ndarray) -> Metric:
        return lambda times: _mean(gain, times[user])

    return {name: mean_of(gain) for name, gain in gains.items()}


def _of_entropies(samples: Mapping[str, np.ndarray], user: np.ndarray) -> dict[str, Metric]:
    """Returns the normalized entropy, unless the run is of a program that does not write entropies."""
    if "entropy" not in samples:
        return {}
    entropy, baseline = samples["entropy"], samples["baseline_entropy"]
    return {"ne": lambda times: exact.entropy_ratio(entropy, baseline, times[user])}


def _of_logits(label: np.ndarray, logit: np.ndarray, user: np.ndarray) -> dict[str, Metric]:
    by_user = np.argsort(user, kind="stable")
    ends = np.cumsum(np.bincount(user))[:-1]
    parts = zip(np.split(label[by_user], ends), np.split(logit[by_user], ends)) if len(user) else ()
    areas = np.array([exact.auc(*part) for part in parts])
    defined = ~np.isnan(areas)
    entropy = np.logaddexp(0.0, logit) - label * logit
    # The scores are sorted once, because a draw changes their weights only.
    order = np.argsort(logit, kind="stable")
    _, tie = np.unique(logit[order], return_inverse=True)

    def area(times: np.ndarray) -> float:
        weight = times[user][order]
        positives = np.bincount(tie, weights=weight * label[order])
        negatives = np.bincount(tie, weights=weight * (1 - label[order]))
        pairs = positives.sum() * negatives.sum()
        below = np.cumsum(negatives) - negatives
        return float(positives @ (below + negatives / 2) / pairs) if pairs else np.nan

    def normalized(times: np.ndarray) -> float:
        rate = _mean(label, times[user])
        if not 0 < rate < 1:
            return np.nan
        return _mean(entropy, times[user]) / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))

    return {"auc": area, "gauc": lambda times: _mean(areas[defined], times[defined]), "ne": normalized}


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    total = weights.sum()
    return float(values @ weights / total) if total else np.nan


def differing(records: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, list[Any]], int]:
    """Returns what differs between runs, and the number of settings that are equal.

    Args:
      records: run.json of each run, by any name.

    Returns:
      Values by setting ("train.epochs") in the order of the runs, None where a run has no such setting; "data", the
      fingerprint; "code", the commit with its changed files; "versions.NAME"; "ranks".
    """
    runs = []
    for record in records.values():
        code = record["code"]
        changed = f" + {code['changed_files']} changed files" if code.get("changed_files") else ""
        facts = {
            "data": record["data"]["fingerprint"],
            "code": code["commit"][:9] + changed if code else None,
            "ranks": record["ranks"],
            "versions": record["versions"],
        }
        runs.append(dict([*flat(record["experiment"]), *flat(facts)]))
    names = [name for name in dict.fromkeys(name for one in runs for name in one) if name not in _PLACES]
    values = {name: [one.get(name) for one in runs] for name in names}
    unequal = {name: row for name, row in values.items() if any(value != row[0] for value in row)}
    return unequal, len(values) - len(unequal)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested settings with names such as "train.epochs"."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def verdict(metric: str, row: Mapping[str, float]) -> str:
    """Returns "better", "worse", or "" where the interval of b - a holds 0."""
    if row["low"] <= 0 <= row["high"] or np.isnan(row["low"]):
        return ""
    falls = metric == "ne" or metric.endswith("_ne")
    return "better" if (row["low"] > 0) != falls else "worse"


def words(table: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yields title, a, b, difference, interval and verdict of each metric of a result of `compare`."""
    for name, row in screen.shown_metrics(table, labels).items():
        numbers = (f"{row['a']:.4f}", f"{row['b']:.4f}", f"{row['difference']:+.4f}")
        yield (screen.title_of(name, labels), *numbers, f"{row['low']:+.4f} to {row['high']:+.4f}", verdict(name, row))


def html(
    runs: Mapping[str, pathlib.Path], records: Mapping[str, Mapping[str, Any]], unequal: Mapping[str, Sequence[Any]],
    tables: Mapping[str, Mapping[str, Mapping[str, float]]], level: float,
) -> str:  # fmt: skip
    """Returns the comparison as one HTML page: settings, data and code that differ, curves of all runs, and metrics.

    Args:
      runs: Folder of each run by its letter.
      records: run.json of each run that has one.
      unequal: First result of `differing`.
      tables: Result of `compare` with the first run, by letter.
      level: Level of the intervals.
    """
    first = next(iter(runs))
    parts = ["<h1>Comparison of runs</h1>", page.table(("run", "folder"), [(name, str(runs[name])) for name in runs])]
    if unequal:
        rows = [(name, *map(str, values)) for name, values in unequal.items()]
        parts += ["<h2>What differs</h2>", page.table(("", *runs), rows)]
    if curves := [*_curves(records)]:
        parts += ["<h2>Training</h2><div class=row>", *curves, "</div>"]
    labels = records.get(first, {}).get("labels", {})
    for letter, metrics in tables.items():
        heads = ("metric", first, letter, f"{letter} - {first}", f"{100 * level:g} % interval", "")
        parts += [f"<h2>{letter} and {first}</h2>", page.table(heads, words(metrics, labels))]
    return page.document("Comparison of runs", parts)


def _curves(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the plots of the epochs of all runs, by the metrics of the first one."""
    trained = {letter: record for letter, record in records.items() if record.get("epochs")}
    names = {"loss": "loss", "held-out loss": "val_loss"}
    if trained:
        names |= {one.title: one.held_out for one in screen.epoch_metrics(next(iter(trained.values())))}
    for title, name in names.items():
        lines = {
            letter: [(epoch["epoch"], epoch[name]) for epoch in record["epochs"] if epoch.get(name) is not None]
            for letter, record in trained.items()
        }
        if lines := {letter: points for letter, points in lines.items() if points}:
            yield page.plot(f"{title} by epoch", lines)
