"""The base of the ranking models (grm.py, dlrm.py): inputs by role, labels of every task, the loss of an exposure.

One sample is one user: scalar columns, the user's history, and exposures, each a separate target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.progressive import ProgressiveMetrics
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.base import Batch, SequenceModel, constant
from tf_fusedrec.models.data_sets.events import hour_of_day
from tf_fusedrec.models.experiment.ranking_config import HOUR, ROLES, RankingConfig
from tf_fusedrec.models.parts.dense_inputs import DenseInputs, Statistics, dense_width, normalizers, time_features
from tf_fusedrec.models.parts.history_dropout import without_events
from tf_fusedrec.models.parts.pooled_history import mean

RARE = -1  # The id that replaces every item below config.min_item_count.
_NO_ITEM = np.iinfo(np.int64).max
# Odd factors of two ids, whose sum modulo 2^64 is the id of the pair (from the fraction of the golden ratio, and of
# the root of 3). Two pairs share an id as rarely as two random numbers of 64 bits.
_FACTORS = (-7046029254386353131, -4942790177534073029)


class RankingModel(SequenceModel):
    """Scores every exposure of every user, once for each task.

    Args:
      config: Names of the feature and label columns, and sizes.
      embedding: Layer with the features of config.table_of_feature. Rows of a table with other than config.dim columns
        are projected to config.dim, by a matrix of the table.
      catalogue: <int64>[I], distinct ids.
      popularity: <int64>[I], training interactions of each item of the catalogue.

    Call:
      inputs: Dict with contextual columns <int64>[B]; RaggedTensors <int64>[B,(L)] history_item, history_action and
        history_time (seconds), and <int64>[B,(E)] exposed_item and exposed_time. Each name of config.item_features
        adds history_<name> and exposed_<name>. Each name of config.item_lists adds these with all ids of a row's
        events in turn, and <role>_<name>_count with the number of ids of each event. Columns of numbers are <float32>.
        The call ignores labels in the dict.
      returns {task: logits}, <float32>[exposures of the batch, by row]. "ctr" predicts a click, "ctcvr" a click with
        a conversion, and any other task its label.
    """

    def __init__(
        self,
        config: RankingConfig,
        embedding: keras.layers.Layer,
        catalogue: np.ndarray,
        popularity: np.ndarray,
        name: str,
    ):
        super().__init__(embedding, name)
        self.config = config
        self.progressive: ProgressiveMetrics | None = None  # Set it before fit, and pass it to fit as a callback.
        tables = embedding.tables if isinstance(embedding, fr.FusedEmbedding) else []
        self._dims = {table.name: table.dim for table in tables if table.dim != config.dim}
        self.projections = {
            name: keras.layers.Dense(config.dim, use_bias=False, name=f"project_{name}") for name in self._dims
        }
        self.normalizers = normalizers(config)
        self._frequent = None
        if config.min_item_count > 1:
            frequent = np.full(max(len(catalogue), 1), _NO_ITEM)
            kept = np.sort(catalogue[np.asarray(popularity) >= config.min_item_count])
            frequent[: len(kept)] = kept
            # The checkpoint holds the list, because the exported model must know the same items.
            self._frequent = constant(self, "frequent_items", frequent)

    def labels(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Returns {"ctr": click, "ctcvr": click and conversion, other tasks}, <float>[exposures of the batch]."""
        click = batch[self.config.click_label].values
        others = {name: batch[f"exposed_{name}"].values for name in self.config.other_labels}
        return {"ctr": click, "ctcvr": click * batch[self.config.conversion_label].values, **others}

    def position_losses(self, batch: Batch, outputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the cross entropy of each exposure, summed over the tasks: <float>[exposures]."""
        labels = self.labels(batch)
        return tf.add_n(
            [tf.nn.sigmoid_cross_entropy_with_logits(labels=labels[task], logits=outputs[task]) for task in outputs]
        )

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> tf.Tensor:
        if self.progressive is not None:
            self.progressive.update(self.labels(x), y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight)

    def num_positions(self, batch: Batch) -> tf.Tensor:
        return tf.size(batch["exposed_item"].values, tf.int64)

    def projection_flops(self, batch: Batch) -> tf.Tensor:
        """Returns the part of `forward_flops` that projects rows to config.dim, <float64>[]."""
        flops = tf.zeros([], tf.float64)
        for name, table in self.config.table_of_feature.items():
            if table in self._dims:
                role = name.partition("_")[0]
                of_users = name in self.config.contextual_features
                rows = batch["exposed_item"].nrows() if of_users else tf.size(batch[f"{role}_item"].values)
                flops += 2.0 * self._dims[table] * self.config.dim * tf.cast(rows, tf.float64)
        return flops

    def set_statistics(self, statistics: Mapping[str, Statistics]) -> None:
        """Sets the statistics by which columns of numbers are normalised: the result of `read_statistics`."""
        for layer in self.normalizers.values():
            layer.set_statistics(statistics)

    def dense_of(self, inputs: Batch) -> DenseInputs:
        """Returns the normalised numbers of users, history events and exposures."""
        found: dict[str, Any] = {}
        for role, layer in self.normalizers.items():
            columns = [inputs[name] for name in layer.columns]
            found[role] = layer([x.values if isinstance(x, tf.RaggedTensor) else x for x in columns])
        if self.config.time_features:
            times = time_features(inputs)
            found["exposed"] = tf.concat([times, found["exposed"]], axis=1) if "exposed" in found else times
        if "history" in found:
            found["history"] = inputs["history_item"].with_values(found["history"])
        return DenseInputs(*(found.get(role) for role in DenseInputs._fields))

    def read(self, inputs: Batch, training: bool | None) -> tuple[Batch, dict[str, Any], DenseInputs]:
        """Returns the batch, its rows and its numbers, in training without config.history_dropout of the events."""
        rows, numbers = self.rows_of(inputs, training), self.dense_of(inputs)
        if training and self.config.history_dropout:
            return without_events(self.config.history_dropout, inputs, rows, numbers)
        return inputs, rows, numbers

    def rows_of(self, inputs: Batch, training: bool | None) -> dict[str, Any]:
        """Looks up the embedding rows of all features in one call: [B, config.dim] by user, [B,(L), config.dim]."""
        ids = {name: inputs[name] for name in (*self.config.contextual_features, "history_action")}
        for role in ROLES:
            ids |= self._ids_of_events(inputs, role, training)
        rows = self.embedding(ids, training=training)
        return {name: self._projected(name, of_feature, inputs) for name, of_feature in rows.items()}

    def own_numbers(self, inputs: Batch, numbers: DenseInputs) -> list[tf.Tensor]:
        """Returns the numbers of each exposure and of its user, <float32>[E, n] each, without the history's numbers."""
        parts = [] if numbers.exposed is None else [numbers.exposed]
        if numbers.contextual is not None:
            parts.append(tf.gather(numbers.contextual, jagged.token_rows(inputs["exposed_item"].row_splits)))
        return parts

    def vectors(self, inputs: Batch, rows: dict[str, Any]) -> list[tf.Tensor]:
        """Returns the rows of the user's context and of the exposure's columns, <float>[E, config.dim] each."""
        user = jagged.token_rows(inputs["exposed_item"].row_splits)
        context = [tf.gather(rows[name], user) for name in self.config.contextual_features]
        return [*context, *(rows[name].values for name in self.config.columns_of("exposed"))]

    @property
    def num_vectors(self) -> int:
        """The number of `vectors`."""
        return len(self.config.contextual_features) + len(self.config.columns_of("exposed"))

    def mean_numbers(self, inputs: Batch, numbers: DenseInputs) -> list[tf.Tensor]:
        """Returns the mean of the numbers of each exposure's history, <float32>[E, n]; nothing without such columns."""
        if numbers.history is None:
            return []
        return [tf.gather(mean(numbers.history), jagged.token_rows(inputs["exposed_item"].row_splits))]

    @property
    def dense_columns(self) -> int:
        """The columns of `own_numbers` and `mean_numbers` together."""
        return sum(dense_width(self.config, role) for role in ("contextual", *ROLES))

    def mean_vectors(self, inputs: Batch, rows: dict[str, Any]) -> list[tf.Tensor]:
        """Returns the mean of each column of the user's history, or zeros without one, <float>[E, config.dim] each."""
        user = jagged.token_rows(inputs["exposed_item"].row_splits)
        return [tf.gather(mean(rows[name]), user) for name in self.event_columns]

    @property
    def event_columns(self) -> tuple[str, ...]:
        """The id columns of an event of the history. They begin like columns_of("exposed"), and end with the action."""
        return (*self.config.columns_of("history"), "history_action")

    def _ids_of_events(self, inputs: Batch, role: str, training: bool | None) -> dict[str, tf.RaggedTensor]:
        config, events = self.config, inputs[f"{role}_item"]
        ids = {name: inputs[name] for name in config.id_columns(role)}
        items = events.values
        if self._frequent is not None:
            items = self._frequent_or_rare(items)
        if role == "exposed" and config.item_dropout and training:
            # The row of unknown items is so trained on items of every kind, not on rare ones alone.
            # A schedule computes ids ahead of their step, and must draw the same again.
            draw = self.step + self.steps_ahead + (self.micro_batch.number << 40)
            seed = tf.stack([tf.constant(fr.rank(), tf.int64), draw])
            dropped = tf.random.stateless_uniform(tf.shape(items), seed) < config.item_dropout
            items = tf.where(dropped, tf.constant(RARE, tf.int64), items)
        ids[f"{role}_item"] = events.with_values(items)

        def part_of(name: str) -> tf.Tensor:
            if name in config.contextual:
                return tf.gather(inputs[name], jagged.token_rows(events.row_splits))
            if name == HOUR:
                return hour_of_day(inputs[f"{role}_time"].values)
            return ids[f"{role}_{name}"].values

        for name, (first, second) in config.cross_features(role).items():
            pairs = part_of(first) * _FACTORS[0] + part_of(second) * _FACTORS[1]
            ids[name] = events.with_values(pairs)
        return {**ids, **{name: ids_of_lists(inputs, name) for name in config.list_columns(role)}}

    def _projected(self, feature: str, rows: Any, inputs: Batch) -> Any:
        """Returns rows of config.dim columns, in the compute dtype of Keras' policy."""
        values = rows.values if isinstance(rows, tf.RaggedTensor) else rows
        project = self.projections.get(self.config.table_of_feature[feature])
        values = tf.cast(values if project is None else project(values), self.compute_dtype)
        if feature in self.config.contextual_features:
            return values
        return inputs[f"{feature.partition('_')[0]}_item"].with_values(values)

    def _frequent_or_rare(self, items: tf.Tensor) -> tf.Tensor:
        index = tf.minimum(tf.searchsorted(self._frequent, items), tf.size(self._frequent) - 1)
        return tf.where(tf.gather(self._frequent, index) == items, items, tf.constant(RARE, tf.int64))


def ids_of_lists(inputs: Batch, column: str) -> tf.RaggedTensor:
    """Returns the ids of each event of a column of config.list_columns, <int64>[events,(K)], by row of the batch.

    The reader cuts the counts to the newest events, and leaves the ids whole. So the last ids of a row belong to them.
    """
    counts = inputs[f"{column}_count"]
    kept = jagged.last(inputs[column], tf.reduce_sum(counts, axis=1))
    return tf.RaggedTensor.from_row_lengths(kept.values, counts.values, validate=False)
