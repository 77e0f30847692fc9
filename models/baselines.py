"""Baselines that a model must beat: label rates of users and items, and popularity, in the training split."""

from __future__ import annotations

import pathlib

import numpy as np

import tf_fusedrec as fr
from models.ranking_config import RankingConfig
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged

# Number of exposures by which the mean rate weighs in every smoothed rate.
PRIOR_EXPOSURES = 10.0


def ranking(config: RankingConfig, folder: pathlib.Path, user: np.ndarray, item: np.ndarray) -> dict[str, np.ndarray]:
    """Scores exposures by the sum of the log odds of the user's and the item's smoothed label rates. Collective.

    Args:
      config: Configuration of the model.
      folder: Folder of the data set. The rates come from its training split.
      user, item: <int64>[E], users and items of the exposures to score.

    Returns:
      Scores <float64>[E] by task, equal on all ranks.
    """
    data = ParquetFolder(
        folder / "train",
        [
            Column("user_id"),
            Column("exposed_item", ragged=True),
            *(Column(name, "float32", ragged=True) for name in config.label_columns),
        ],
        rank=fr.collectives.rank(),
        world_size=fr.collectives.size(),
    )
    parts: dict[str, list[np.ndarray]] = {"user": [], "item": [], **{name: [] for name in config.label_columns}}
    for rows in data.read():
        lists = {name: column for name, column in rows.columns.items() if isinstance(column, Ragged)}
        parts["user"].append(np.repeat(np.asarray(rows.columns["user_id"]), lists["exposed_item"].lengths()))
        parts["item"].append(lists["exposed_item"].values)
        for name in config.label_columns:
            parts[name].append(lists[name].values)
    shown = {
        name: fr.collectives.all_gather(np.concatenate([np.empty(0, np.int64), *values]))
        for name, values in parts.items()
    }
    click = shown[config.click_label]
    labels = {"ctr": click, "ctcvr": click * shown[config.conversion_label]}
    labels |= {name: shown[f"exposed_{name}"] for name in config.other_labels}
    return {
        task: _log_odds(shown["user"], label, user) + _log_odds(shown["item"], label, item)
        for task, label in labels.items()
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


def normalized(entropy: np.ndarray, baseline: np.ndarray, times: np.ndarray | float = 1.0) -> float:
    """Returns the normalized entropy: the sum of `entropy` over that of `baseline`, nan entries left out of both.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014. There, the baseline
    predicts the mean rate of clicks. Here, it predicts items by their popularity.

    Args:
      entropy, baseline: <float64>[B] of model and baseline, nan at the same places.
      times: <int64>[B], the number of times that each entry counts.
    """
    total = float(np.nansum(times * baseline))
    return float(np.nansum(times * entropy)) / total if total else np.nan


def _log_odds(shown: np.ndarray, label: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the log odds of each id's smoothed rate, or of the mean rate for ids that were never shown."""
    known, index, count = np.unique(shown, return_inverse=True, return_counts=True)
    mean = np.clip(label.mean() if len(label) else 0.5, 1e-6, 1 - 1e-6)
    positives = np.bincount(index, weights=label, minlength=len(known))
    rate = np.append((positives + PRIOR_EXPOSURES * mean) / (count + PRIOR_EXPOSURES), mean)
    at = np.searchsorted(known, ids)
    found = (at < len(known)) & (np.append(known, 0)[np.minimum(at, len(known))] == ids)
    rate = rate[np.where(found, at, len(known))]
    return np.log(rate / (1 - rate))
