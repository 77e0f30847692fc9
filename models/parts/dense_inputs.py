"""Numbers as inputs of ranking models: statistics of the training split, normalisation, missing values, times.

A number x becomes (x - mean) / deviation. A missing number (NaN) becomes 0, and an indicator beside each number says
whether it is missing.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column, ParquetFolder
from tf_fusedrec.data.rows import Ragged
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.base import Batch, constant
from tf_fusedrec.models.experiment.model_config import ModelConfig
from tf_fusedrec.models.experiment.ranking_config import ROLES, RankingConfig

TIME_COLUMNS = 4  # columns of time_features
_DAY = 86_400.0
_CONSTANT = 1e-12  # deviation in units of the mean that rounding gives equal numbers


class Statistics(NamedTuple):
    """Statistics of one column of numbers, without its missing values."""

    known: int  # numbers that are not missing
    mean: float
    deviation: float


class DenseInputs(NamedTuple):
    """Normalised numbers and indicators, float32; None without columns."""

    contextual: tf.Tensor | None  # [B, C]
    history: tf.RaggedTensor | None  # [B,(L),C]
    exposed: tf.Tensor | None  # [E, C], by row; the time features come first


class Normalize(keras.layers.Layer):
    """Normalises numbers by statistics that the checkpoint and the export hold.

    Args:
      columns: Names of the columns.
      log1p: <bool>, whether each column goes through sign(x) log(1 + |x|) first.

    Call:
      values: One tensor <float32>[N] for each column.
      returns <float32>[N, 2 C]: the normalised numbers, then 1 for a missing number and 0 for another.
    """

    def __init__(self, columns: Sequence[str], log1p: Sequence[bool], **layer_arguments: Any):
        super().__init__(**layer_arguments)
        self.columns, self.log1p = tuple(columns), tuple(log1p)
        self.mean = constant(self, "mean", np.zeros(len(columns), np.float32))
        self.deviation = constant(self, "deviation", np.ones(len(columns), np.float32))

    def set_statistics(self, statistics: Mapping[str, Statistics]) -> None:
        """Sets the statistics of all columns."""
        self.mean.assign([statistics[name].mean for name in self.columns])
        self.deviation.assign([statistics[name].deviation for name in self.columns])

    def call(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        numbers = tf.stack([_log1p(x) if log else x for x, log in zip(values, self.log1p)], axis=1)
        missing = tf.math.is_nan(numbers)
        normalized = tf.where(missing, 0.0, (numbers - self.mean) / self.deviation)
        return tf.concat([normalized, tf.cast(missing, tf.float32)], axis=1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "columns": self.columns, "log1p": self.log1p}


def normalizers(config: RankingConfig) -> dict[str, Normalize]:
    """Returns the layers of the roles that have columns of numbers."""
    return {
        role: Normalize(config.dense_columns(role), config.dense_log1p(role), name=f"normalize_{role}", dtype="float32")
        for role in ("contextual", *ROLES)
        if config.dense_columns(role)
    }


def dense_width(config: RankingConfig, role: str) -> int:
    """Returns the columns C of a role in DenseInputs, 0 for None."""
    times = TIME_COLUMNS if role == "exposed" and config.time_features else 0
    return times + 2 * len(config.dense_columns(role))


def time_features(inputs: Batch) -> tf.Tensor:
    """Returns <float32>[E, 4]: the history's length, the time since its newest event, the hour's sine and cosine."""
    history, exposed = inputs["history_time"], inputs["exposed_time"]
    user = jagged.token_rows(exposed.row_splits)
    lengths = history.row_lengths()
    last = tf.gather(tf.concat([history.values, [0]], axis=0), tf.maximum(history.row_splits[1:] - 1, 0))
    since = log_seconds(exposed.values - tf.gather(tf.where(lengths > 0, last, 0), user))
    since = tf.where(tf.gather(lengths, user) > 0, since, 0.0)
    angle = tf.cast(tf.math.floormod(exposed.values, int(_DAY)), tf.float32) * (2 * math.pi / _DAY)
    long = tf.math.log1p(tf.cast(tf.gather(lengths, user), tf.float32))
    return tf.stack([long, since, tf.sin(angle), tf.cos(angle)], axis=1)


def log_seconds(seconds: tf.Tensor) -> tf.Tensor:
    """Returns log(1 + seconds) / 10, <float32>, which is about 1 for six hours; 0 for negative times."""
    return tf.math.log1p(tf.maximum(tf.cast(seconds, tf.float32), 0.0)) / 10.0


def read_statistics(config: ModelConfig, folder: pathlib.Path) -> dict[str, Statistics]:
    """Returns the statistics of every column of numbers in the training split, behind its log1p. Collective.

    A retrieval model has no such column.

    Raises:
      ValueError: A column is missing, has no number, infinite numbers, or the same number everywhere. The message
        names column and folder.
    """
    if not isinstance(config, RankingConfig):
        return {}
    logs: dict[str, bool] = {}
    columns: list[Column] = []
    for role in ("contextual", *ROLES):
        columns += [Column(name, "float32", ragged=role in ROLES) for name in config.dense_columns(role)]
        logs |= dict(zip(config.dense_columns(role), config.dense_log1p(role)))
    if not columns:
        return {}
    data = ParquetFolder(folder / "train", columns)
    own = {name: Statistics(0, 0.0, 0.0) for name in logs}
    for rows in data.read():
        for name, column in rows.columns.items():
            values = np.asarray(column.values if isinstance(column, Ragged) else column, np.float64)
            values = values[~np.isnan(values)]
            values = np.sign(values) * np.log1p(np.abs(values)) if logs[name] else values
            if len(values):
                with np.errstate(invalid="ignore"):  # Infinite numbers give NaN, which is refused below.
                    own[name] = _joined(own[name], Statistics(len(values), float(values.mean()), float(values.std())))
    found = dict(own)
    for number, others in enumerate(fr.collectives.all_gather_object(own)):
        found = others if number == 0 else {name: _joined(found[name], others[name]) for name in found}
    for name, (known, mean, deviation) in found.items():
        where = f"{data.path}: column {name!r}"
        remedy = "Remove it from the model's dense columns, or correct the data."
        if not known and name.startswith("history_"):
            raise ValueError(
                f"{where} has no number: no user has a known one before the last data.window events. {remedy} A "
                "smaller data.window gives histories to users of few events."
            )
        if not known:
            raise ValueError(f"{where} has no number, all of its values are missing (NaN). {remedy}")
        if not math.isfinite(deviation):
            raise ValueError(f"{where} has infinite numbers, want finite ones or NaN. {remedy}")
        if deviation <= _CONSTANT * abs(mean):
            raise ValueError(f"{where} has the same number everywhere, {mean:g} after log1p if any. {remedy}")
    return found


def _joined(a: Statistics, b: Statistics) -> Statistics:
    """Statistics of two parts together, without differences of large sums."""
    known = a.known + b.known
    if not known:
        return a
    share = b.known / known
    gap = b.mean - a.mean
    variance = a.deviation**2 * (1 - share) + b.deviation**2 * share + gap**2 * share * (1 - share)
    return Statistics(known, a.mean + gap * share, math.sqrt(variance))


def _log1p(x: tf.Tensor) -> tf.Tensor:
    return tf.sign(x) * tf.math.log1p(tf.abs(x))
