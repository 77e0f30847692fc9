"""Builds an experiment's data columns, embedding layer and model for train.py, evaluate.py and export.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column
from tf_fusedrec.models.dcn import DCN
from tf_fusedrec.models.din import DIN
from tf_fusedrec.models.dlrm import DLRM
from tf_fusedrec.models.experiment import Experiment
from tf_fusedrec.models.experiment.model_config import GRMConfig, ModelConfig, RetrievalConfig
from tf_fusedrec.models.experiment.ranking_config import ROLES, RankingConfig
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.parts.dense_inputs import Statistics
from tf_fusedrec.models.ranking import RankingModel
from tf_fusedrec.models.retrieval import HSTURetrieval

RANKING_MODELS: dict[str, Callable[..., RankingModel]] = {"grm": GRM, "dlrm": DLRM, "din": DIN, "dcn": DCN}


def made_features(model: ModelConfig) -> tuple[str, ...]:
    """Returns the features without a column: negatives that the retrieval model draws, and learned crosses."""
    if not isinstance(model, RankingConfig):
        return ("negative",)
    return tuple(name for role in ROLES for name in model.cross_features(role))


def ids_by_table(model: ModelConfig, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the columns of a batch that the embedding layer looks up, by table; learned crosses have none."""
    ids: dict[str, list[Any]] = {}
    for name, table in model.table_of_feature.items():
        if name in batch:
            ids.setdefault(table, []).append(batch[name])
    return ids


def features(model: ModelConfig) -> list[fr.FeatureConfig]:
    """Returns the features of the model's embedding layer."""
    return [
        fr.FeatureConfig(name, table, combiner=_combiner(model, name), output_dtype=_output_dtype(model, name))
        for name, table in model.table_of_feature.items()
    ]


def make_embedding(experiment: Experiment) -> fr.FusedEmbedding:
    """Returns the embedding layer of an experiment."""
    config = experiment.embedding
    return fr.FusedEmbedding(
        tables=experiment.tables,
        features=features(experiment.model),
        seed=experiment.seed,
        accumulate_steps=experiment.train.accumulate_steps,
        topology=config.topology,
        wire_dtype=None if config.wire_dtype == "float32" else config.wire_dtype,
        name="embedding",
    )


def make_model(
    experiment: Experiment,
    embedding: keras.layers.Layer,
    catalogue: np.ndarray,
    popularity: np.ndarray,
    statistics: Mapping[str, Statistics] | None = None,
) -> RankingModel | HSTURetrieval:
    """Returns the model of an experiment with its schedule.

    It sets Keras' global policy to train.precision, because layers look it up when they make their weights.

    Args:
      experiment: Experiment.
      embedding: Layer of make_embedding.
      catalogue, popularity: <int64>[I], the results of read_items.
      statistics: Result of read_statistics, for a model with columns of numbers. {} leaves them to a checkpoint.

    Raises:
      ValueError: The model has columns of numbers, and there are no statistics.
    """
    keras.mixed_precision.set_global_policy(experiment.train.precision)
    model: RankingModel | HSTURetrieval
    if isinstance(experiment.model, RankingConfig):
        model = RANKING_MODELS[experiment.model.kind](experiment.model, embedding, catalogue, popularity)
        if statistics:
            model.set_statistics(statistics)
        elif statistics is None and model.normalizers:
            raise ValueError(
                f"make_model got no statistics for {[*model.normalizers]} columns of numbers. Pass "
                "read_statistics(experiment.model, folder)."
            )
    else:
        model = HSTURetrieval(
            experiment.model,
            embedding,
            catalogue,
            popularity,
            seed=experiment.seed,
            rank=fr.rank(),
        )
    model.schedule = experiment.train.schedule
    return model


def columns(model: ModelConfig, split: str) -> list[Column]:
    """Returns the columns to read from `split` ("train" or "test").

    Sequences are cut to the model's length. The test histories of retrieval are read whole, because the evaluation
    removes all seen items from the candidates. Only their newest part enters the model.
    """
    if isinstance(model, RankingConfig):

        def history(name: str, dtype: str = "int64") -> Column:
            other = _other(name, "history_item")
            return Column(name, dtype, ragged=True, keep_last=model.max_history, aligned_with=other)

        def exposed(name: str, dtype: str = "int64") -> Column:
            other = _other(name, "exposed_item")
            return Column(name, dtype, ragged=True, keep_last=model.max_exposures, aligned_with=other)

        found = [Column(name) for name in dict.fromkeys(["user_id", *model.contextual])]
        for of_role, further in ((history, ("history_action", "history_time")), (exposed, ("exposed_time",))):
            role = further[0].partition("_")[0]
            lists = model.list_columns(role)
            found += [of_role(name) for name in (*model.id_columns(role), *further, *(f"{x}_count" for x in lists))]
            found += [of_role(name, "float32") for name in model.dense_columns(role)]
            found += [Column(name, ragged=True) for name in lists]
        found += [exposed(name, "float32") for name in model.label_columns]
        found += [Column(name, ragged=True) for name in model.contextual_lists]
        return found + [Column(name, "float32") for name in model.contextual_dense]
    # One item more than the model takes, because the last item is only predicted.
    keep = model.max_history + 1 if split == "train" else None
    sequence = [
        Column("item_id", ragged=True, keep_last=keep),
        Column("timestamp", ragged=True, keep_last=keep, aligned_with="item_id"),
    ]
    if split == "train":
        return sequence
    return [Column("user_id"), *sequence, Column("target_item"), Column("target_timestamp")]


def no_rows(columns: Sequence[Column]) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """Returns a batch without rows. A model creates its weights when it is called with it."""
    batch = {}
    for column in columns:
        values = tf.zeros([0], column.value_dtype)
        no_splits = tf.zeros([1], tf.int64)
        batch[column.name] = tf.RaggedTensor.from_row_splits(values, no_splits) if column.ragged else values
    return batch


def _other(name: str, reference: str) -> str | None:
    """Returns the column with which `name` must be aligned, or None for the reference itself."""
    return None if name == reference else reference


def length_columns(model: ModelConfig) -> list[str]:
    """Returns the list columns whose values become tokens."""
    if isinstance(model, RankingConfig):
        return ["history_item", "exposed_item"]
    return ["item_id"]


def extra_tokens(model: ModelConfig) -> int:
    """Returns the number of tokens that every row has in addition to its lists."""
    return model.context_tokens if isinstance(model, GRMConfig) else 0


def _combiner(model: ModelConfig, feature: str) -> str | None:
    if not isinstance(model, RankingConfig):
        return None
    lists = (*model.contextual_lists, *(name for role in ROLES for name in model.list_columns(role)))
    return model.list_combiner if feature in lists else None


def _output_dtype(model: ModelConfig, feature: str) -> str | None:
    return model.negatives_dtype if isinstance(model, RetrievalConfig) and feature == "negative" else None
