"""Evaluates a model on the held-out split: loss, AUC and GAUC, or HR@K, NDCG@K, MRR and NE, beside a baseline.

Every rank scores its share of the users. Predictions are gathered, and tf_fusedrec.metrics computes exact metrics on
all of them. Lookups are collective, so all ranks run the same number of batches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import tf
from tf_fusedrec.data import ParquetFolder, TokenBatches
from tf_fusedrec.layers import jagged
from tf_fusedrec.metrics import exact
from tf_fusedrec.models import baselines, screen
from tf_fusedrec.models.build import columns, extra_tokens, length_columns
from tf_fusedrec.models.data_sets.layouts import read_items
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.export import trained_model
from tf_fusedrec.models.prepare import prepare_data, with_new_data
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.models.retrieval import HSTURetrieval
from tf_fusedrec.models.run_folder import checkpoint_of
from tf_fusedrec.models.saved_run import saved_experiment

_ITEMS_AT_ONCE = 1 << 16
_SCORES_AT_ONCE = 1 << 20  # logits in memory at a time; 4 MiB stay in the cache from the product to the sum


class Evaluation(NamedTuple):
    """Metrics and the samples behind them."""

    results: dict[str, float]  # Metrics by name. Names of baselines begin with "baseline_".
    # Arrays of equal length with an entry per test exposure or user. compare.py pairs two runs by them.
    samples: dict[str, np.ndarray]


def evaluate(experiment: Experiment, model: RankingModel | HSTURetrieval, folder: pathlib.Path) -> Evaluation:
    """Returns the evaluation on the test split, equal on all ranks. Collective."""
    return evaluator(experiment, model)(folder)


def evaluator(experiment: Experiment, model: RankingModel | HSTURetrieval) -> Callable[..., Evaluation]:
    """Returns a collective function (folder, split="test") that evaluates the model as it is at the call.

    The model is traced in the first call and the baseline computed in the first call of a split only, so a program
    that evaluates often keeps one evaluator.
    """
    if isinstance(model, RankingModel):
        return _ranking_evaluator(experiment, model)
    return _retrieval_evaluator(experiment, model)


def _batches(experiment: Experiment, split: pathlib.Path) -> Iterator[dict]:
    data = ParquetFolder(
        split,
        columns(experiment.model, "test"),
        bad_rows=experiment.data.bad_rows,
    )
    batches = TokenBatches(
        data,
        length_columns=length_columns(experiment.model),
        extra_tokens=extra_tokens(experiment.model),
        target_tokens_per_rank=experiment.evaluate.target_tokens_per_rank,
    )
    return iter(batches.dataset())


def _gathered(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """Returns one array of all ranks' parts, in rank order. Collective."""
    return fr.collectives.all_gather(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))


def _ranking_evaluator(experiment: Experiment, model: RankingModel) -> Callable[..., Evaluation]:
    score = tf.function(lambda batch: model(batch, training=False), reduce_retracing=True)
    of_split: dict[pathlib.Path, dict[str, np.ndarray]] = {}  # the baselines do not depend on the model

    def evaluate_split(folder: pathlib.Path, split: str = "test") -> Evaluation:
        return _evaluate_ranking(experiment, model, score, folder / split, of_split.setdefault(folder / split, {}))

    return evaluate_split


def _evaluate_ranking(
    experiment: Experiment,
    model: RankingModel,
    score: Callable[[dict], dict],
    split: pathlib.Path,
    rates: dict[str, np.ndarray],
) -> Evaluation:
    """Evaluates the model. `rates` has the baseline's scores by task, and gets them in the first evaluation."""
    parts: dict[str, list] = {}
    for batch in _batches(experiment, split):
        exposed = batch["exposed_item"]
        found = {"user": tf.gather(batch["user_id"], exposed.value_rowids()), "item": exposed.values}
        found["time"] = batch["exposed_time"].values
        labels = model.labels(batch)
        for task, logit in score(batch).items():
            found |= {f"{task}_logit": logit, f"{task}_label": labels[task]}
        for name, values in found.items():
            parts.setdefault(name, []).append(values.numpy())
    tasks = model.config.tasks
    kinds = {"user": np.int64, "item": np.int64, "time": np.int64}
    names = [*kinds, *(f"{task}_{what}" for task in tasks for what in ("logit", "label"))]
    samples = {name: _gathered(parts.get(name, []), kinds.get(name, np.float64)) for name in names}
    results = {"exposures": float(len(samples["user"])), "loss": 0.0}
    if not rates:
        rates |= baselines.ranking(model.config, split.parent, samples["user"], samples["item"])
    for task in tasks:
        logit, label = samples[f"{task}_logit"], samples[f"{task}_label"]
        # This form of log(1 + e^x) - y x does not overflow.
        entropy = np.logaddexp(0.0, logit) - label * logit
        results["loss"] += float(np.mean(entropy)) if len(label) else np.nan
        results |= {f"{task}_{name}": value for name, value in _of_task(samples["user"], label, logit).items()}
        results[f"baseline_{task}_auc"] = exact.auc(label, rates[task])
        results[f"baseline_{task}_gauc"] = exact.gauc(samples["user"], label, rates[task])
        samples[f"baseline_{task}"] = rates[task]
    return Evaluation(results, samples)


def _of_task(user: np.ndarray, label: np.ndarray, logit: np.ndarray) -> dict[str, float]:
    return {
        "auc": exact.auc(label, logit),
        "gauc": exact.gauc(user, label, logit),
        "ne": exact.normalized_entropy(label, logit),
        "calibration": exact.calibration(label, logit),
    }


def _retrieval_evaluator(experiment: Experiment, model: HSTURetrieval) -> Callable[..., Evaluation]:
    @tf.function(reduce_retracing=True)
    def embed(batch: dict) -> tf.Tensor:
        newest = experiment.model.max_history
        items, times = jagged.last(batch["item_id"], newest), jagged.last(batch["timestamp"], newest)
        return model.embed_users(items, times, batch["target_timestamp"])

    of_split: dict[pathlib.Path, list[dict[str, np.ndarray]]] = {}  # the baselines do not depend on the model

    def evaluate_split(folder: pathlib.Path, split: str = "test") -> Evaluation:
        return _evaluate_retrieval(experiment, model, embed, folder / split, of_split.setdefault(folder / split, []))

    return evaluate_split


def _evaluate_retrieval(
    experiment: Experiment,
    model: HSTURetrieval,
    embed: Callable[[dict], tf.Tensor],
    split: pathlib.Path,
    of_popularity: list[dict[str, np.ndarray]],
) -> Evaluation:
    """Evaluates the model. `of_popularity` has the baselines of each batch, and gets them in the first evaluation."""
    item_ids, popularity = read_items(split.parent)
    item_vectors = np.concatenate(
        [
            model.embed_items(tf.constant(item_ids[begin : begin + _ITEMS_AT_ONCE])).numpy()
            for begin in range(0, len(item_ids), _ITEMS_AT_ONCE)
        ]
    )
    parts: dict[str, list[np.ndarray]] = {}
    for number, batch in enumerate(_batches(experiment, split)):
        users = embed(batch).numpy()  # Collective: a rank without users must call it too.
        targets = batch["target_item"].numpy()
        seen = {"seen_ids": batch["item_id"].values.numpy(), "seen_row_splits": batch["item_id"].row_splits.numpy()}
        if number == len(of_popularity):
            everyone, scores = np.ones([len(users), 1]), popularity[:, np.newaxis] * 1.0
            of_popularity.append(
                {
                    "baseline_rank": exact.rank_of_target(everyone, scores, item_ids, target_ids=targets, **seen),
                    "baseline_entropy": baselines.popularity_entropy(popularity, item_ids, targets),
                }
            )
        found = {
            "user": batch["user_id"].numpy(),
            "rank": exact.rank_of_target(users, item_vectors, item_ids, target_ids=targets, **seen),
            "entropy": entropy_of_target(users, item_vectors, item_ids, targets, model.config.temperature),
            **of_popularity[number],
        }
        for name, values in found.items():
            parts.setdefault(name, []).append(values)
    kinds = {"user": np.int64, "rank": np.int64, "baseline_rank": np.int64}
    names = [*kinds, "entropy", "baseline_entropy"]
    samples = {name: _gathered(parts.get(name, []), kinds.get(name, np.float64)) for name in names}
    results = {"users": float(len(samples["user"]))}
    for prefix in ("", "baseline_"):
        ranks = samples[f"{prefix}rank"]
        for cutoff in experiment.evaluate.cutoffs:
            results[f"{prefix}hr@{cutoff}"] = exact.hit_rate(ranks, cutoff)
            results[f"{prefix}ndcg@{cutoff}"] = exact.ndcg(ranks, cutoff)
        results[f"{prefix}mrr"] = exact.mrr(ranks)
    results["ne"] = exact.entropy_ratio(samples["entropy"], samples["baseline_entropy"])
    return Evaluation(results, samples)


def entropy_of_target(
    users: np.ndarray, items: np.ndarray, item_ids: np.ndarray, target_ids: np.ndarray, temperature: float
) -> np.ndarray:
    """Returns -log softmax(users . items / temperature) of each target over the whole catalogue, <float64>[B].

    This is the loss of training without its sampling. A target outside the catalogue gives nan.

    Args:
      users, items: <float32>[B, D] and [I, D], L2-normalised.
      item_ids: <int64>[I], ascending. target_ids: <int64>[B].
    """
    at = np.minimum(np.searchsorted(item_ids, target_ids), len(item_ids) - 1)
    entropy = np.empty(len(users))
    step = max(1, _SCORES_AT_ONCE // max(len(items), 1))
    users = users / np.float32(temperature)
    for begin in range(0, len(users), step):
        logits = users[begin : begin + step] @ items.T
        own = logits[np.arange(len(logits)), at[begin : begin + step]]
        highest = logits.max(axis=1, keepdims=True)
        logits -= highest
        total = highest[:, 0] + np.log(np.exp(logits, out=logits).sum(axis=1))
        entropy[begin : begin + step] = total - own
    return np.where(item_ids[at] == target_ids, entropy, np.nan)


def table(results: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Returns the metrics as lines of text, each beside its baseline, in the words of a run's screen.

    Args:
      results: Results of an Evaluation.
      labels: Label of each task of a ranking model; {}: a retrieval model.
    """
    lines = [("metric", "test", "baseline")]
    measured = {name: value for name, value in results.items() if not name.startswith("baseline_")}
    for name, value in screen.shown_metrics(measured, labels).items():
        baseline = results.get(f"baseline_{name}")
        shown = f"{value:.0f}" if value > 1 and float(value).is_integer() else f"{value:.4f}"
        lines.append((screen.title_of(name, labels), shown, "" if baseline is None else f"{baseline:.4f}"))
    width = max(14, *(len(title) + 2 for title, *_ in lines))
    return "\n".join(f"{title:<{width}}{value:>10}{baseline:>10}".rstrip() for title, value, baseline in lines)


def evaluate_run(run: pathlib.Path, data: str | None = None) -> Evaluation:
    """Evaluates a run's checkpoint on its test split or on other data. Collective.

    Args:
      run: Output folder of `fusedrec train`, or its checkpoint folder.
      data: Raw or converted data set to use instead of the run's, or None for the run's. All events of raw tables are
        scored, and events of the run's own data are history.

    Raises:
      ValueError: `run` is no folder or has no checkpoint of a run, or the data are missing or of another kind.
      RuntimeError: Rank 0 could not prepare the data; raised on the other ranks.
    """
    if not run.is_dir():
        raise ValueError(f"RUN must be an output folder of `fusedrec train`, got {str(run)!r}, which is no folder.")
    checkpoint = checkpoint_of(run) or run
    experiment = saved_experiment(checkpoint)
    if data is not None:
        experiment = with_new_data(experiment, data, held_out="all")
    folder = prepare_data(experiment, experiment.data.cache)
    return evaluate(experiment, trained_model(checkpoint), folder)
