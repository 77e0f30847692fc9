"""The figures of finished jobs: means over seeds, and the bootstrap intervals of differences from GRM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.compare import check_pairs, metrics_of

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
    """Returns the headline fields. Fields of the click task have no prefix, fields of the second begin with "second_".

    Args:
      test: {model: {metric: {"mean": value}}}.
      between: Result of `differences`.
      tasks: The click task and the second one.
    """
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
