"""From an experiment to its data columns, embedding layer and model. Shared by train.py, evaluate.py and export.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import tf_fusedrec as fr
from models.dlrm import DLRM
from models.experiment import EmbeddingConfig, Experiment
from models.grm import GRM
from models.model_config import DLRMConfig, GRMConfig, ModelConfig, RankingConfig, RetrievalConfig
from models.ranking import RankingModel, embedded_features
from models.retrieval import HSTURetrieval
from models.schedule_choice import schedule_of
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column

# Features that no column feeds: retrieval draws its negatives itself.
MADE_FEATURES = ("negative",)


def table_of_feature(model: ModelConfig) -> dict[str, str]:
    """The table that each feature of the model reads, by feature name."""
    if isinstance(model, RankingConfig):
        return embedded_features(model)
    return {"item_id": "item", "negative": "item"}


def features(model: ModelConfig) -> list[fr.FeatureConfig]:
    """The features of the model's embedding layer."""
    return [
        fr.FeatureConfig(name, table, output_dtype=_output_dtype(model, name))
        for name, table in table_of_feature(model).items()
    ]


def make_embedding(experiment: Experiment) -> fr.FusedEmbedding:
    """The trained tables of an experiment. They have one spec, so they are fused into one group."""
    config = experiment.embedding
    return fr.FusedEmbedding(
        tables=[
            fr.TableConfig(
                name=name,
                dim=experiment.model.dim,
                initializer=fr.TruncatedNormal(stddev=config.stddev),
                optimizer=_table_optimizer(config),
            )
            for name in sorted(set(table_of_feature(experiment.model).values()))
        ],
        features=features(experiment.model),
        seed=experiment.seed,
        topology=config.topology,
        wire_dtype=None if config.wire_dtype == "float32" else config.wire_dtype,
        name="embedding",
    )


def make_model(
    experiment: Experiment, embedding: keras.layers.Layer, catalogue: np.ndarray, popularity: np.ndarray
) -> RankingModel | HSTURetrieval:
    """The model of an experiment, under its schedule; catalogue and popularity are <int64>[I], as of read_items."""
    model: RankingModel | HSTURetrieval
    if isinstance(experiment.model, GRMConfig):
        model = GRM(experiment.model, embedding, catalogue, popularity)
    elif isinstance(experiment.model, DLRMConfig):
        model = DLRM(experiment.model, embedding, catalogue, popularity)
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
    """The columns that `split` ("train" or "test") is read with.

    Sequences are cut to what the model takes. The test histories of retrieval are read whole: all that
    a user has seen is removed from the candidates, and the newest part goes into the model.
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
    # One more than the model takes: the last item is only predicted.
    keep = model.max_history + 1 if split == "train" else None
    sequence = [
        Column("item_id", ragged=True, keep_last=keep),
        Column("timestamp", ragged=True, keep_last=keep, aligned_with="item_id"),
    ]
    if split == "train":
        return sequence
    return [Column("user_id"), *sequence, Column("target_item"), Column("target_timestamp")]


def no_rows(columns: Sequence[Column]) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """A batch without rows: a model that is called with it makes its weights."""
    batch = {}
    for column in columns:
        values = tf.zeros([0], column.value_dtype)
        no_splits = tf.zeros([1], tf.int64)
        batch[column.name] = tf.RaggedTensor.from_row_splits(values, no_splits) if column.ragged else values
    return batch


def _other(name: str, reference: str) -> str | None:
    """The column that `name` must be aligned with: the reference, unless it is that itself."""
    return None if name == reference else reference


def length_columns(model: ModelConfig) -> list[str]:
    """List columns whose values become tokens."""
    if isinstance(model, RankingConfig):
        return ["history_item", "exposed_item"]
    return ["item_id"]


def extra_tokens(model: ModelConfig) -> int:
    """Tokens that every row has beside those of its lists."""
    return len(model.contextual) if isinstance(model, GRMConfig) else 0


def _table_optimizer(config: EmbeddingConfig) -> fr.optimizers.Rule:
    if config.optimizer == "adam":
        return fr.optimizers.Adam(config.learning_rate, beta_2=config.beta_2, epsilon=config.epsilon)
    kinds = {"adagrad": fr.optimizers.Adagrad, "sgd": fr.optimizers.SGD}
    return kinds[config.optimizer](config.learning_rate)


def _output_dtype(model: ModelConfig, feature: str) -> str | None:
    return model.negatives_dtype if isinstance(model, RetrievalConfig) and feature == "negative" else None
