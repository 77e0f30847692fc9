"""The baseline without a model: smoothed label rates of users and items, whose prior the validation split chooses."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.training import score
from models import baselines
from models.compare import metrics_of
from models.experiment.ranking_config import RankingConfig

# Exposures by which the mean rate weighs, as many settings as a model has.
PRIORS = (10.0, 3.0, 30.0, 100.0, 1.0, 5.0, 20.0, 50.0)


def samples_of(config: RankingConfig, folder: pathlib.Path, prior: float) -> dict[str, np.ndarray]:
    """Returns the samples of the held-out part of `folder`, in the order of compare.read_samples."""
    shown = baselines.exposures(config, folder / "test")
    order = np.lexsort([shown.time, shown.item, shown.user])
    scores = baselines.ranking(config, folder, shown.user, shown.item, prior)
    samples = {"user": shown.user, "item": shown.item, "time": shown.time}
    for task, label in shown.labels.items():
        samples |= {f"{task}_label": label, f"{task}_logit": scores[task]}
    return {name: values[order] for name, values in samples.items()}


def choose(
    config: RankingConfig, folder: pathlib.Path, deciding: Sequence[str], priors: Sequence[float]
) -> dict[str, Any]:
    """Returns the best prior on the validation split `folder` by the deciding metrics, its score, and all scores."""
    scores = {prior: score(results(config, folder, prior), deciding) for prior in priors}
    chosen = max(scores, key=lambda prior: scores[prior])
    tried = [{"prior": prior, "scores": [round(value, 4)]} for prior, value in scores.items()]
    return {"setting": {"prior": chosen}, "score": scores[chosen], "tried": tried}


def results(config: RankingConfig, folder: pathlib.Path, prior: float) -> dict[str, float]:
    """Returns the metrics of the held-out part of `folder`."""
    measured = metrics_of(samples := samples_of(config, folder, prior))
    everyone = np.ones(len(np.unique(samples["user"])), np.int64)
    return {name: metric(everyone) for name, metric in measured.items()}
