"""The figures of the finished jobs: metrics by variant, differences from the baseline, curves, growth of moments."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.schedule_quality.job import METRICS, Entry
from benchmarks.schedule_quality.moments import expected_moment
from models.compare import compare, read_samples

BASELINE = "sync"
RESAMPLES, LEVEL = 1000, 0.95
# The variant of each number of groups whose steps are nearest to the baseline's: its moments are scaled by that number.
OF_GROUPS = {1: BASELINE, 2: "weight_sync_g2_c2", 4: "weight_sync_g4_c4"}


class Finished(Protocol):
    """A job, see __main__.Job."""

    @property
    def variant(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def folder(self) -> pathlib.Path: ...
    @property
    def request(self) -> dict[str, Any]: ...
    @property
    def finished(self) -> bool: ...


def summary(jobs: Sequence[Finished], ranks: int, patience: int) -> dict[str, Any]:
    """Returns the fields of the JSON file."""
    done = {(job.variant, job.seed): job.folder for job in jobs if job.finished}
    curves = {key: json.loads((folder / "curve.json").read_text(encoding="utf-8")) for key, folder in done.items()}
    variants = {variant: row(variant, done) for variant in dict.fromkeys(job.variant for job in jobs if job.finished)}
    experiment = jobs[0].request["experiment"]
    return {
        "variants": variants,
        "missing": [f"{job.variant} seed {job.seed}" for job in jobs if not job.finished],
        "curves": [{"variant": variant, "seed": seed, "epochs": of} for (variant, seed), of in curves.items()],
        "growth": growth({groups: curves.get((variant, jobs[0].seed)) for groups, variant in OF_GROUPS.items()}),
        "users": next((len(read_samples(folder)["user"]) for folder in done.values()), 0),
        "ranks": ranks,
        "patience": patience,
        "tokens_per_batch_of_a_rank": experiment["train"]["target_tokens"],
        "model": experiment["model"],
        "embedding": {name: experiment["embedding"][name] for name in ("optimizer", "learning_rate")},
        "level": LEVEL,
        "resamples": RESAMPLES,
    }


def row(variant: str, done: Mapping[tuple[str, int], pathlib.Path]) -> dict[str, Any]:
    """Returns means over the finished seeds, and differences from BASELINE over the seeds that both have finished."""
    seeds = [seed for name, seed in done if name == variant]
    results = [json.loads((done[variant, seed] / "result.json").read_text(encoding="utf-8")) for seed in seeds]
    pairs = [seed for seed in seeds if (BASELINE, seed) in done]
    table = {}
    if pairs:
        a, b = ([read_samples(done[name, seed]) for seed in pairs] for name in (BASELINE, variant))
        table = compare(joined(a), joined(b), RESAMPLES, 0, LEVEL)
    found: dict[str, Any] = {
        "seeds": seeds,
        "epochs": [result["epoch"] for result in results],
        "pairs": pairs,
        "commits": sorted({result["commit"] for result in results}),
    }
    for metric in METRICS:
        key, of_seeds = metric.replace("@", "_at_"), [result["test"][metric] for result in results]
        found |= {key: float(np.mean(of_seeds)), f"{key}_by_seed": of_seeds}
        if pairs:
            found |= {f"{key}_{part}": table[metric][part] for part in ("difference", "low", "high")}
    return found


def joined(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the samples of several seeds as one run, in which a user has one sample per seed."""
    return {name: np.concatenate([one[name] for one in samples]) for name in samples[0]}


def growth(curves: Mapping[int, Sequence[Entry] | None]) -> list[dict[str, float]]:
    """Returns the mean second moment by epoch, `measured_M` for every finished number of groups M and `expected_4`.

    Args:
      curves: Curve of every number of groups, None for a job that is not finished.
    """
    measured = {groups: [entry["moment"] for entry in curve] for groups, curve in curves.items() if curve}
    epochs = min(map(len, measured.values()), default=0)
    found = []
    for epoch in range(epochs):
        entry: dict[str, float] = {"epoch": epoch + 1}
        entry |= {f"measured_{groups}": moments[epoch] for groups, moments in measured.items()}
        if {1, 2} <= set(measured):
            entry["expected_4"] = float(expected_moment(4, measured[1][epoch], measured[2][epoch]))
        found.append(entry)
    return found
