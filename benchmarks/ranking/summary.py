"""The figures of finished jobs: means over seeds, bootstrap intervals of differences from GRM; the rates, a baseline.

The baseline without a model is the smoothed label rates of users and items, whose prior the validation split chooses.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.training import score
from models import baselines
from models.compare import check_pairs, metrics_of
from models.experiment.ranking_config import RankingConfig

METRICS = ("gauc", "auc")
RESAMPLES, LEVEL = 1000, 0.95
OURS = "grm"
Samples = Mapping[str, np.ndarray]


def differences(
    samples: Mapping[str, Sequence[Samples]], names: Sequence[str], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns GRM minus each other model: {model: {metric: difference, low, high}}, of the means over seeds.

    A draw takes users with replacement, the same for all models and seeds, because exposures of one user are not
    independent. The interval has the percentiles of LEVEL.

    Args:
      samples: Samples of every seed by model (compare.read_samples), all of the same exposures.
      names: Names of metrics, such as "ctr_gauc".
      resamples: Number of draws.
      seed: Seed of the draws.
    """
    first = samples[OURS][0]
    for of_model in samples.values():
        for one in of_model:
            check_pairs(first, one)
    measured = {model: [metrics_of(one) for one in of_model] for model, of_model in samples.items()}
    users = len(np.unique(first["user"]))

    def means(times: np.ndarray) -> dict[str, np.ndarray]:
        return {
            model: np.mean([[one[name](times) for name in names] for one in of_model], axis=0)
            for model, of_model in measured.items()
        }

    whole = means(np.ones(users, np.int64))
    generator = np.random.default_rng(seed)
    draws = [means(np.bincount(generator.integers(0, users, users), minlength=users)) for _ in range(resamples)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model in [name for name in samples if name != OURS]:
        drawn = np.array([draw[OURS] - draw[model] for draw in draws]).reshape(resamples, len(names))
        low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        between = whole[OURS] - whole[model]
        found[model] = {
            name: {"difference": float(between[at]), "low": float(low[at]), "high": float(high[at])}
            for at, name in enumerate(names)
        }
    return found


def flat(
    test: Mapping[str, Mapping[str, Mapping[str, float]]],
    between: Mapping[str, Mapping[str, Mapping[str, float]]],
    tasks: Sequence[str],
) -> dict[str, Any]:
    """Returns the headline fields. Fields of the click task have no prefix, others begin with "second_"."""
    fields: dict[str, Any] = {}
    for prefix, task in zip(("", "second_"), tasks):
        for metric in METRICS:
            name = f"{task}_{metric}"
            means = {model: of_model[name]["mean"] for model, of_model in test.items()}
            fields |= {f"{prefix}{metric}_{model}": value for model, value in means.items()}
            best = max(between, key=lambda model: means[model])
            fields[f"{prefix}{metric}_best_baseline"] = best
            row = between[best][name]
            fields[f"{prefix}{metric}_difference"] = row["difference"]
            fields |= {f"{prefix}{metric}_difference_{end}": row[end] for end in ("low", "high")}
    return fields


def of_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Returns the mean, the standard deviation and the values of every metric over seeds."""
    values = {name: [one[name] for one in results] for name in results[0]}
    return {
        name: {"mean": float(np.mean(each)), "deviation": float(np.std(each)), "seeds": each}
        for name, each in values.items()
    }


# Exposures by which the mean rate weighs, as many settings as a model has.
PRIORS = (10.0, 3.0, 30.0, 100.0, 1.0, 5.0, 20.0, 50.0)


def rates_samples(config: RankingConfig, folder: pathlib.Path, prior: float) -> dict[str, np.ndarray]:
    """Returns the samples of the held-out part of `folder`, in the order of compare.read_samples."""
    shown = baselines.exposures(config, folder / "test")
    order = np.lexsort([shown.time, shown.item, shown.user])
    scores = baselines.ranking(config, folder, shown.user, shown.item, prior)
    samples = {"user": shown.user, "item": shown.item, "time": shown.time}
    for task, label in shown.labels.items():
        samples |= {f"{task}_label": label, f"{task}_logit": scores[task]}
    return {name: values[order] for name, values in samples.items()}


def choose_prior(
    config: RankingConfig, folder: pathlib.Path, deciding: Sequence[str], priors: Sequence[float]
) -> dict[str, Any]:
    """Returns the best prior on the validation split `folder` by the deciding metrics, its score, and all scores."""
    scores = {prior: score(rates_results(config, folder, prior), deciding) for prior in priors}
    chosen = max(scores, key=lambda prior: scores[prior])
    tried = [{"prior": prior, "scores": [round(value, 4)]} for prior, value in scores.items()]
    return {"setting": {"prior": chosen}, "score": scores[chosen], "tried": tried}


def rates_results(config: RankingConfig, folder: pathlib.Path, prior: float) -> dict[str, float]:
    """Returns the metrics of the held-out part of `folder`."""
    measured = metrics_of(samples := rates_samples(config, folder, prior))
    everyone = np.ones(len(np.unique(samples["user"])), np.int64)
    return {name: metric(everyone) for name, metric in measured.items()}
