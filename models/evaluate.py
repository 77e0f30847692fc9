"""The held-out split: loss, AUC and GAUC of both heads, or HR@K, NDCG@K and MRR; each beside a simple baseline.

Every rank scores its share of the users, predictions are gathered, and the exact metrics of tf_fusedrec.metrics
are computed on the whole. Lookups are collective, so all ranks run the same number of batches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

import tf_fusedrec as fr
from models.build import columns, extra_tokens, length_columns
from models.experiment import Experiment, RankingConfig
from models.grm import GRM, TASKS
from models.retrieval import HSTURetrieval
from tf_fusedrec import metrics, tf
from tf_fusedrec.data import Column, ParquetFolder, read_items, token_balanced_dataset
from tf_fusedrec.data.rows import Ragged
from tf_fusedrec.layers import jagged

# An item's rate starts at the mean rate with the weight of so many exposures.
PRIOR_EXPOSURES = 10.0
_ITEMS_AT_ONCE = 1 << 16


def evaluate(experiment: Experiment, model: GRM | HSTURetrieval, folder: pathlib.Path) -> dict[str, float]:
    """Metrics of the test split, by name; baselines are named "baseline_...". All ranks call it, all get it."""
    if isinstance(model, GRM):
        return _evaluate_ranking(experiment, model, folder)
    return _evaluate_retrieval(experiment, model, folder)


def agreed_batches(experiment: Experiment, data: ParquetFolder, target_tokens: int, **epochs: int) -> int:
    """Batches of an epoch: the most that any rank has in any of the epochs. Collective."""
    own = data.count_batches(
        length_columns=length_columns(experiment.model),
        extra_tokens=extra_tokens(experiment.model),
        target_tokens=target_tokens,
        **epochs,
    )
    return int(fr.collectives.all_gather(np.array([own], np.int64)).max())


def _test_batches(experiment: Experiment, folder: pathlib.Path) -> Iterator[dict]:
    data = ParquetFolder(
        folder / "test",
        columns(experiment.model, "test"),
        rank=fr.collectives.rank(),
        world_size=fr.collectives.size(),
    )
    target_tokens = experiment.evaluate.target_tokens
    steps = agreed_batches(experiment, data, target_tokens, epochs=1)
    if not steps:
        return iter(())
    return iter(
        token_balanced_dataset(
            data,
            length_columns=length_columns(experiment.model),
            extra_tokens=extra_tokens(experiment.model),
            target_tokens=target_tokens,
            steps_per_epoch=steps,
        )
    )


def _gathered(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """One array of all parts of all ranks, in rank order."""
    return fr.collectives.all_gather(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))


def _evaluate_ranking(experiment: Experiment, model: GRM, folder: pathlib.Path) -> dict[str, float]:
    score = tf.function(lambda batch: model(batch, training=False), reduce_retracing=True)
    users, items = [], []
    logits: dict[str, list] = {task: [] for task in TASKS}
    labels: dict[str, list] = {task: [] for task in TASKS}
    for batch in _test_batches(experiment, folder):
        for task, logit in score(batch).items():
            logits[task].append(logit.numpy())
            labels[task].append(model.labels(batch)[task].numpy())
        exposed = batch["exposed_item"]
        users.append(tf.gather(batch["user_id"], exposed.value_rowids()).numpy())
        items.append(exposed.values.numpy())
    user, item = _gathered(users, np.int64), _gathered(items, np.int64)
    results = {"exposures": float(len(user)), "loss": 0.0}
    rates = _item_rates(model.config, folder, item)
    for task in TASKS:
        logit = _gathered(logits[task], np.float64)
        label = _gathered(labels[task], np.float64)
        # log(1 + e^x) - y x, without overflow.
        results["loss"] += float(np.mean(np.logaddexp(0.0, logit) - label * logit)) if len(user) else np.nan
        results[f"{task}_auc"] = metrics.auc(label, logit)
        results[f"{task}_gauc"] = metrics.gauc(user, label, logit)
        results[f"baseline_{task}_auc"] = metrics.auc(label, rates[task])
        results[f"baseline_{task}_gauc"] = metrics.gauc(user, label, rates[task])
    return results


def _item_rates(config: RankingConfig, folder: pathlib.Path, item: np.ndarray) -> dict[str, np.ndarray]:
    """Baseline: each item's smoothed rate of clicks (and of clicks that convert) in the training exposures."""
    names = dict.fromkeys([config.click_label, config.conversion_label])
    data = ParquetFolder(
        folder / "train",
        [Column("exposed_item", ragged=True), *(Column(n, "float32", ragged=True) for n in names)],
        rank=fr.collectives.rank(),
        world_size=fr.collectives.size(),
    )
    shown, clicked, converted = [], [], []
    for rows in data.read():
        lists = {name: column.values for name, column in rows.columns.items() if isinstance(column, Ragged)}
        shown.append(lists["exposed_item"])
        clicked.append(lists[config.click_label])
        converted.append(lists[config.click_label] * lists[config.conversion_label])
    known, index, count = np.unique(_gathered(shown, np.int64), return_inverse=True, return_counts=True)
    rates = {}
    for task, parts in zip(TASKS, (clicked, converted)):
        label = _gathered(parts, np.float64)
        mean = label.mean() if len(label) else 0.0
        positives = np.bincount(index, weights=label, minlength=len(known))
        of_known = (positives + PRIOR_EXPOSURES * mean) / (count + PRIOR_EXPOSURES)
        # One more entry, the mean, for items that were never shown in training.
        at = np.searchsorted(known, item)
        found = (at < len(known)) & (np.append(known, 0)[np.minimum(at, len(known))] == item)
        rates[task] = np.append(of_known, mean)[np.where(found, at, len(known))]
    return rates


def _evaluate_retrieval(experiment: Experiment, model: HSTURetrieval, folder: pathlib.Path) -> dict[str, float]:
    item_ids, popularity = read_items(folder)
    item_vectors = np.concatenate(
        [
            model.embed_items(tf.constant(item_ids[begin : begin + _ITEMS_AT_ONCE])).numpy()
            for begin in range(0, len(item_ids), _ITEMS_AT_ONCE)
        ]
    )

    @tf.function(reduce_retracing=True)
    def embed(batch: dict) -> tf.Tensor:
        newest = experiment.model.max_history
        items, times = jagged.last(batch["item_id"], newest), jagged.last(batch["timestamp"], newest)
        return model.embed_users(items, times, batch["target_timestamp"])

    own, popular = [], []
    for batch in _test_batches(experiment, folder):
        users = embed(batch).numpy()  # all ranks, also with no users
        seen = {
            "target_ids": batch["target_item"].numpy(),
            "seen_ids": batch["item_id"].values.numpy(),
            "seen_row_splits": batch["item_id"].row_splits.numpy(),
        }
        own.append(metrics.rank_of_target(users, item_vectors, item_ids, **seen))
        everyone = np.ones([len(users), 1])
        popular.append(metrics.rank_of_target(everyone, popularity[:, np.newaxis] * 1.0, item_ids, **seen))
    all_ranks = {"": _gathered(own, np.int64), "baseline_": _gathered(popular, np.int64)}
    results = {"users": float(len(all_ranks[""]))}
    for prefix, ranks in all_ranks.items():
        for cutoff in experiment.evaluate.cutoffs:
            results[f"{prefix}hr@{cutoff}"] = metrics.hit_rate(ranks, cutoff)
            results[f"{prefix}ndcg@{cutoff}"] = metrics.ndcg(ranks, cutoff)
        results[f"{prefix}mrr"] = metrics.mrr(ranks)
    return results
