"""Builds an experiment's data columns, embedding layer and model for train.py, evaluate.py and export.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from models.dcn import DCN
from models.din import DIN
from models.dlrm import DLRM
from models.experiment import Experiment
from models.grm import GRM
from models.model_config import GRMConfig, ModelConfig, RankingConfig, RetrievalConfig
from models.ranking import RankingModel
from models.retrieval import HSTURetrieval
from models.schedule_choice import schedule_of
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column
from tf_fusedrec.schedules.in_flight import InFlight

RANKING_MODELS: dict[str, Callable[..., RankingModel]] = {"grm": GRM, "dlrm": DLRM, "din": DIN, "dcn": DCN}
# Features without a column, because the retrieval model draws its negatives itself.
MADE_FEATURES = ("negative",)


def ids_by_table(model: ModelConfig, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the columns of a batch that the embedding layer looks up, by table."""
    ids: dict[str, list[Any]] = {}
    for name, table in model.table_of_feature.items():
        if name not in MADE_FEATURES:
            ids.setdefault(table, []).append(batch[name])
    return ids


def features(model: ModelConfig) -> list[fr.FeatureConfig]:
    """Returns the features of the model's embedding layer."""
    return [
        fr.FeatureConfig(name, table, output_dtype=_output_dtype(model, name))
        for name, table in model.table_of_feature.items()
    ]


def make_embedding(experiment: Experiment) -> fr.FusedEmbedding:
    """Returns the embedding layer of an experiment."""
    config, schedule = experiment.embedding, schedule_of(experiment.train.schedule)
    return fr.FusedEmbedding(
        tables=experiment.tables,
        features=features(experiment.model),
        seed=experiment.seed,
        accumulate_steps=experiment.train.accumulate_steps,
        # Rows that a schedule has looked up may not move before their update.
        lookups_per_update=1 + schedule.staleness if isinstance(schedule, InFlight) else 1,
        topology=config.topology,
        wire_dtype=None if config.wire_dtype == "float32" else config.wire_dtype,
        name="embedding",
    )


def make_model(
    experiment: Experiment, embedding: keras.layers.Layer, catalogue: np.ndarray, popularity: np.ndarray
) -> RankingModel | HSTURetrieval:
    """Returns the model of an experiment with its schedule. catalogue and popularity <int64>[I] are read_items'.

    It sets Keras' global policy to train.precision, because layers look it up when they make their weights.
    """
    keras.mixed_precision.set_global_policy(experiment.train.precision)
    model: RankingModel | HSTURetrieval
    if isinstance(experiment.model, RankingConfig):
        model = RANKING_MODELS[experiment.model.kind](experiment.model, embedding, catalogue, popularity)
    else:
        model = HSTURetrieval(
            experiment.model,
            embedding,
            catalogue,
            popularity,
            seed=experiment.seed,
            rank=fr.collectives.rank(),
        )
    model.schedule = schedule_of(experiment.train.schedule)
    return model


def columns(model: ModelConfig, split: str) -> list[Column]:
    """Returns the columns to read from `split` ("train" or "test").

    Sequences are cut to the model's length. The test histories of retrieval are read whole, because the evaluation
    removes all seen items from the candidates. Only their newest part enters the model.
    """
    if isinstance(model, RankingConfig):

        def history(name: str) -> Column:
            return Column(name, ragged=True, keep_last=model.max_history, aligned_with=_other(name, "history_item"))

        def exposed(name: str, dtype: str = "int64") -> Column:
            other = _other(name, "exposed_item")
            return Column(name, dtype, ragged=True, keep_last=model.max_exposures, aligned_with=other)

        return [
            *[Column(name) for name in dict.fromkeys(["user_id", *model.contextual])],
            *[history(name) for name in (*model.columns_of("history"), "history_action", "history_time")],
            *[exposed(name) for name in (*model.columns_of("exposed"), "exposed_time")],
            *[exposed(name, "float32") for name in model.label_columns],
        ]
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
    return len(model.contextual) if isinstance(model, GRMConfig) else 0


def _output_dtype(model: ModelConfig, feature: str) -> str | None:
    return model.negatives_dtype if isinstance(model, RetrievalConfig) and feature == "negative" else None
