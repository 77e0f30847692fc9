"""What a model must beat: rates of users and items counted in the training split. Used by evaluate.py."""

from __future__ import annotations

import pathlib

import numpy as np

import tf_fusedrec as fr
from models.model_config import RankingConfig
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged

# A rate starts at the mean rate with the weight of so many exposures.
PRIOR_EXPOSURES = 10.0


def ranking(config: RankingConfig, folder: pathlib.Path, user: np.ndarray, item: np.ndarray) -> dict[str, np.ndarray]:
    """Scores of exposures, by task: log odds of the smoothed label rates of the user and of the item, added.

    Args:
      config: of the model.
      folder: of the data set; rates are those of the training exposures.
      user, item: <int64>[E], of the exposures to score.

    Returns:
      task -> <float64>[E]. All ranks call it, all get it.
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


def _log_odds(shown: np.ndarray, label: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Of the smoothed rate of each id asked; of the mean rate for ids that were never shown."""
    known, index, count = np.unique(shown, return_inverse=True, return_counts=True)
    mean = np.clip(label.mean() if len(label) else 0.5, 1e-6, 1 - 1e-6)
    positives = np.bincount(index, weights=label, minlength=len(known))
    rate = np.append((positives + PRIOR_EXPOSURES * mean) / (count + PRIOR_EXPOSURES), mean)
    at = np.searchsorted(known, asked)
    found = (at < len(known)) & (np.append(known, 0)[np.minimum(at, len(known))] == asked)
    rate = rate[np.where(found, at, len(known))]
    return np.log(rate / (1 - rate))
