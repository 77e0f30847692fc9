"""Baselines that a model must beat: label rates of users and items, and popularity, in the training split."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged
from tf_fusedrec.models.experiment.ranking_config import RankingConfig

PRIOR_EXPOSURES = 10.0  # prior of the main job's baseline, see `ranking`


class Exposures(NamedTuple):
    """E exposures of one part of a data set, on all ranks."""

    user: np.ndarray  # <int64>[E]
    item: np.ndarray  # <int64>[E]
    time: np.ndarray  # <int64>[E]
    labels: dict[str, np.ndarray]  # <float>[E] by task


def exposures(config: RankingConfig, part: pathlib.Path) -> Exposures:
    """Returns the exposures of the folder of one part, "train" or "test". Collective."""
    names = ("exposed_item", "exposed_time")
    data = ParquetFolder(
        part,
        [
            Column("user_id"),
            *(Column(name, ragged=True) for name in names),
            *(Column(name, "float32", ragged=True) for name in config.label_columns),
        ],
    )
    parts: dict[str, list[np.ndarray]] = {"user": [], **{name: [] for name in (*names, *config.label_columns)}}
    for rows in data.read():
        lists = {name: column for name, column in rows.columns.items() if isinstance(column, Ragged)}
        parts["user"].append(np.repeat(np.asarray(rows.columns["user_id"]), lists["exposed_item"].lengths()))
        for name, column in lists.items():
            parts[name].append(column.values)
    shown = {
        name: fr.collectives.all_gather(np.concatenate([np.empty(0, np.int64), *values]))
        for name, values in parts.items()
    }
    click = shown[config.click_label]
    labels = {"ctr": click, "ctcvr": click * shown[config.conversion_label]}
    labels |= {name: shown[f"exposed_{name}"] for name in config.other_labels}
    return Exposures(shown["user"], shown["exposed_item"], shown["exposed_time"], labels)


def ranking(
    config: RankingConfig, folder: pathlib.Path, user: np.ndarray, item: np.ndarray, prior: float = PRIOR_EXPOSURES
) -> dict[str, np.ndarray]:
    """Scores exposures by the sum of the log odds of the user's and the item's smoothed label rates. Collective.

    Args:
      config: Configuration of the model.
      folder: Folder of the data set. The rates come from its training split.
      user, item: <int64>[E], users and items of the exposures to score.
      prior: Number of exposures by which the mean rate weighs in every smoothed rate.

    Returns:
      Scores <float64>[E] by task, equal on all ranks.
    """
    shown = exposures(config, folder / "train")
    return {
        task: _log_odds(shown.user, label, user, prior) + _log_odds(shown.item, label, item, prior)
        for task, label in shown.labels.items()
    }


def popularity_entropy(popularity: np.ndarray, item_ids: np.ndarray, target_ids: np.ndarray) -> np.ndarray:
    """Returns -log of each target's share of the training interactions, <float64>[B]; nan outside the catalogue.

    Every item counts one interaction more than it has, so that no share is 0.

    Args:
      popularity, item_ids: <int64>[I], as read_items returns them.
      target_ids: <int64>[B].
    """
    at = np.minimum(np.searchsorted(item_ids, target_ids), len(item_ids) - 1)
    share = (popularity + 1.0) / (popularity.sum() + len(popularity))
    return np.where(item_ids[at] == target_ids, -np.log(share[at]), np.nan)


def _log_odds(shown: np.ndarray, label: np.ndarray, ids: np.ndarray, prior: float) -> np.ndarray:
    """Returns the log odds of each id's smoothed rate, or of the mean rate for ids that were never shown."""
    known, index, count = np.unique(shown, return_inverse=True, return_counts=True)
    mean = np.clip(label.mean() if len(label) else 0.5, 1e-6, 1 - 1e-6)
    positives = np.bincount(index, weights=label, minlength=len(known))
    rate = np.append((positives + prior * mean) / (count + prior), mean)
    at = np.searchsorted(known, ids)
    found = (at < len(known)) & (np.append(known, 0)[np.minimum(at, len(known))] == ids)
    rate = rate[np.where(found, at, len(known))]
    return np.log(rate / (1 - rate))
