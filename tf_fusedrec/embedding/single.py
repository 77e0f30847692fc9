"""Embedding: one table for one feature, tensor in and tensor out."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_fusedrec._tf_compat import keras, keras_api
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding.layer import FusedEmbedding
from tf_fusedrec.exchange.topology import Topology


@keras.saving.register_keras_serializable("tf_fusedrec")
class Embedding(FusedEmbedding):
    """A dynamic table over all ranks for one feature, in place of keras.layers.Embedding: any int64 is an id.

    It is a FusedEmbedding whose calls take and give tensors. A training step makes 3 all-to-alls for each Embedding; a
    FusedEmbedding makes them for many features at once.

    Args:
      dim: Columns of a row, D.
      optimizer: As TableConfig.optimizer.
      combiner, padding_id: As in FeatureConfig.
      name: Name of the layer and of its table.
      seed, topology: As in FusedEmbedding.
      **options: Other fields of TableConfig, such as initializer or limits. Use FusedEmbedding for its other options.

    Call:
      inputs: ids <int>: dense [B] or [B, L], RaggedTensor [B, (L)] or SparseTensor [B, L].
      weights: per-id weights in the same form, for a combiner.
      mask, training: As in FusedEmbedding.
      returns rows [B, D], [B, L, D] or RaggedTensor [B, (L), D]; [B, D] with a combiner.

    Raises:
      ValueError: As TableConfig, FeatureConfig and FusedEmbedding.

    Examples:
      >>> rows = fr.Embedding(4, "adagrad", combiner="mean")(tf.ragged.constant([[3, 5], []], dtype=tf.int64))
      >>> rows.shape
      TensorShape([2, 4])
    """

    def __init__(
        self,
        dim: int,
        optimizer: Any,
        combiner: str | None = None,
        padding_id: int | None = None,
        name: str | None = None,
        *,
        seed: int = 0,
        topology: Topology | None = None,
        **options: Any,
    ):
        fields = {field.name for field in dataclasses.fields(TableConfig)}
        if unknown := sorted(set(options) - fields):
            raise TypeError(
                f"Embedding must get fields of TableConfig as further arguments, {sorted(fields)}, got {unknown}. Use "
                "padding_id for mask_zero. The layer needs no number of ids."
            )
        # Keras' own Embedding has the names that the class would give.
        name = name or keras_api.unique_layer_name("DynamicEmbedding")
        table = TableConfig(name, dim, optimizer, **options)
        feature = FeatureConfig("ids", table, combiner, padding_id=padding_id)
        super().__init__([feature], seed=seed, topology=topology, name=name)
        self.internals.takes_tensor = True

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None, mask: Any = None) -> Any:
        by_feature = self.internals.by_feature
        return super().call(by_feature(inputs), by_feature(weights), training, by_feature(mask))["ids"]

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        masks = super().compute_mask(*map(self.internals.by_feature, (inputs, mask)))
        return None if masks is None else masks["ids"]

    def compute_output_spec(self, inputs: Any, *_: Any, **__: Any) -> Any:
        return super().compute_output_spec(self.internals.by_feature(inputs))["ids"]

    def compute_output_shape(self, input_shape: Any, *_: Any) -> tuple:
        pooled = self.internals.features["ids"].combiner is not None
        return (*(tuple(input_shape)[:1] if pooled else input_shape), self.tables[0].dim)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        (table,), (feature,) = config["tables"], config["features"]
        kept = {name: config[name] for name in ("trainable", "seed", "topology")}
        return {"table": table, "combiner": feature["combiner"], "padding_id": feature["padding_id"], **kept}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """A layer of the same table, with no rows. tf_fusedrec.checkpoint.load restores rows."""
        table = TableConfig.from_dict(config["table"])
        options = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
        options["topology"] = Topology(**config["topology"])
        layer = cls(**options, **{name: config[name] for name in ("combiner", "padding_id", "seed")})
        layer.trainable = config["trainable"]
        return layer
