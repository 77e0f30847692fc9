"""FusedEmbedding, the Keras layer: features in, rows out, tables that train themselves. Composes the other rooms."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec import collectives, features
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.grouping import group_tables
from tf_fusedrec.lookup import GroupLookup, gradient_scale
from tf_fusedrec.tables import TfraTable


class FusedEmbedding(keras.layers.Layer):
    """Distributed dynamic embedding tables for many features (FusedRec, Algorithm 1).

    Tables of equal spec (dim, dtype, initializer, optimizer) are fused into groups by themselves. A training step costs
    three all2alls per group whatever the number of features: ids, rows, gradients. Tables grow as ids come.

    Training happens inside the gradient: when a tape asks for the gradient of the layer's one trainable weight, a
    scalar anchor, gradients go to the rows' owners and their optimizer is applied there. So the layer works in
    `model.fit` and in any custom loop; `layer.trainable = False` freezes the tables. Dense optimizers never see rows
    (clipping by global norm does not count them), and loss scaling is refused since rows would get scaled gradients.

    On R processes every call is collective: all ranks must call the layer equally often, with no ids if need be.

    Args:
      tables: TableConfig of each table.
      features: FeatureConfig of each feature.
      seed: initial rows are a pure function of (seed, table name, id).
      gradient_op: "average" over ranks, as hvd.DistributedOptimizer does with dense gradients, or "sum", TFRA's rule.
      key_encoding: how (table, id) becomes a TFRA key: "bits" (exact; ids must be >= 0 and fit) or "hash" (any id).
      keep_reverse_map: with "hash": remember the ids behind keys; without, rows cannot be exported or checkpointed.
      init_capacity: rows per group and rank for which memory is taken at once.

    Call:
      inputs: dict from feature name to ids: dense [B] or [B, L], RaggedTensor [B, (L)], SparseTensor [B, L]; int32 or
        int64. May hold a subset of the features.
      weights: dict from feature name to per-id weights in the same form, for features with a combiner.

    Returns:
      dict from feature name to rows: [B, D], [B, L, D] or RaggedTensor [B, (L), D]; [B, D] with a combiner.

    Raises:
      ValueError: unknown features, ids that are not integers, weights that do not suit. InvalidArgumentError at run
        time: row_splits that lie, ids that do not fit "bits", two trainings from lookups of one step.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        *,
        seed: int = 0,
        gradient_op: str = "average",
        key_encoding: str = "bits",
        keep_reverse_map: bool = True,
        init_capacity: int = 1 << 16,
        name: str = "fused_embedding",
        **kwargs: Any,
    ):
        super().__init__(name=name, dtype=tf.float32, **kwargs)
        collectives.check_init()
        if keras.mixed_precision.global_policy().name == "mixed_float16":
            raise ValueError(
                "FusedEmbedding cannot train under the policy mixed_float16: it scales the loss, and rows are trained "
                "before the scale is taken off. Use mixed_bfloat16."
            )
        scale = gradient_scale(gradient_op)
        self._config = {
            "tables": [table.to_dict() for table in tables],
            "features": [dataclasses.asdict(feature) for feature in features],
            "seed": seed,
            "gradient_op": gradient_op,
            "key_encoding": key_encoding,
            "keep_reverse_map": keep_reverse_map,
            "init_capacity": init_capacity,
        }
        self._features = {feature.name: feature for feature in features}
        lookups = []
        with tf.init_scope():
            for group in group_tables(tables, features):
                table = TfraTable(
                    f"{name}/{group.name}",
                    group.tables,
                    key_encoding=key_encoding,
                    seed=seed,
                    init_capacity=init_capacity,
                    keep_reverse_map=keep_reverse_map,
                )
                lookups.append(GroupLookup(name, group, table, scale))
        # A plain holder: Keras would track TFRA's variables as weights, and TensorFlow's checkpoint only rank 0's rows.
        self._holder = _Untracked(lookups)
        self._anchor = self.add_weight(name="anchor", shape=(), initializer="zeros", dtype=tf.float32)
        self._calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.built = True

    @property
    def lookups(self) -> Sequence[GroupLookup]:
        """The groups, in an order that is the same on all ranks."""
        return self._holder.value

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizer that trains each table, by table name; tables of one group share theirs."""
        return {name: lookup.table.optimizer for lookup in self.lookups for name in lookup.table.names}

    def call(self, inputs: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._lookup(inputs, weights or {})

    # Nothing in here needs AutoGraph, and converting it would cost seconds per trace.
    @tf.autograph.experimental.do_not_convert
    def _lookup(self, inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
        flat = self._flatten(inputs, weights)
        call = self._next_call()
        outputs: dict[str, Any] = {}
        for lookup in self.lookups:
            mine = [flat[f.name] for f in lookup.group.features if f.name in flat]
            if mine:
                outputs.update(self._rows_of_group(lookup, mine, call))
        return {name: outputs[name] for name in inputs}

    def _rows_of_group(self, lookup: GroupLookup, mine: list[features.FlatFeature], call: int) -> dict[str, Any]:
        lengths = None

        @tf.custom_gradient
        def forward(anchor: tf.Tensor):
            nonlocal lengths
            rows, lengths, context = lookup.lookup(mine, call=call)

            @tf.autograph.experimental.do_not_convert
            def train(grads: tf.Tensor) -> tf.Tensor:
                lookup.apply_gradients(context, grads)
                return tf.zeros_like(anchor)

            return rows, train

        anchor = self._anchor.read_value()
        rows = forward(anchor if self.trainable else tf.stop_gradient(anchor))
        parts = tf.split(rows, lengths) if len(mine) > 1 else [rows]
        for part in parts:
            part.set_shape([None, rows.shape[1]])
        return {f.config.name: features.restore_form(f, part) for f, part in zip(mine, parts)}

    def _flatten(self, inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, features.FlatFeature]:
        if not isinstance(inputs, Mapping) or not inputs:
            raise ValueError(f"inputs of {self.name!r} must be a dict from feature names to ids, got {inputs!r}.")
        for what, names in (("inputs", inputs), ("weights", weights)):
            unknown = sorted(set(names) - set(self._features if what == "inputs" else inputs))
            if unknown:
                known = sorted(self._features if what == "inputs" else inputs)
                raise ValueError(f"{what} of {self.name!r} hold unknown features {unknown}. Known features: {known}.")
        return {name: features.flatten(self._features[name], ids, weights.get(name)) for name, ids in inputs.items()}

    def _next_call(self) -> int:
        """Number of this call in its graph; eager calls run one after another and may share the number 0."""
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        number = self._calls.get(graph, 0)
        self._calls[graph] = number + 1
        return number

    def export_table(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """ids <int64>[n], ascending, and rows [n, D] of one table that this rank holds. Eager, not collective."""
        for lookup in self.lookups:
            if name in lookup.table.names:
                exported = lookup.table.export()[name]
                return exported["ids"], exported["rows"]
        raise ValueError(f"{self.name!r} has no table {name!r}. Known tables: {sorted(self.optimizers)}.")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbedding:
        """A layer of the same tables and features, with no rows. Rows come back with tf_fusedrec.checkpoint.load."""
        config = dict(config)
        config.pop("dtype", None)
        config["tables"] = [TableConfig.from_dict(table) for table in config["tables"]]
        config["features"] = [FeatureConfig(**feature) for feature in config["features"]]
        return cls(**config)


class _Untracked:
    """Holds a value out of sight of Keras' and TensorFlow's attribute tracking."""

    def __init__(self, value: Any):
        self.value = value
