"""The FusedEmbedding layers with the tables of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_fusedrec._tf_compat import keras, keras_api, of_other_keras, tf
from tf_fusedrec.embedding import FusedEmbedding, embeddings_of


def saved_embeddings(
    model: tf.Module, layers: Sequence[FusedEmbedding] = (), optimizer: Any = None
) -> list[FusedEmbedding]:
    """The FusedEmbedding layers of a model, and additional ones. The order is the same on all ranks."""
    if of_other_keras(model) or not isinstance(model, (tf.Module, keras.layers.Layer)):
        raise TypeError(
            f"model must be a keras.Model or a FusedEmbedding, got {type(model).__name__}"
            + (f", which {keras_api.OTHER_KERAS}" if of_other_keras(model) else ".")
        )
    if isinstance(layers, FusedEmbedding) or not all(isinstance(layer, FusedEmbedding) for layer in layers):
        raise TypeError(f"layers must be a list of FusedEmbedding layers, got {layers!r}.")
    if isinstance(optimizer, FusedEmbedding):
        raise TypeError(
            f"optimizer must be an optimizer, got the layer {optimizer.name!r}. The layers of the model are found; use "
            "layers=[...] for others."
        )
    embeddings = list({id(layer): layer for layer in (*embeddings_of(model), *layers)}.values())
    if not embeddings:
        raise ValueError(
            f"model {model.name!r} holds no FusedEmbedding layer, but a checkpoint needs tables. Make the "
            "layer an attribute of the model, or pass it in layers=[...]; save dense weights alone with "
            "tf.train.Checkpoint."
        )
    owners: dict[str, FusedEmbedding] = {}
    for layer in embeddings:
        for group in layer.internals.groups:
            for table in group.table.names:
                if table in owners:
                    raise ValueError(
                        f"layers {owners[table].name!r} and {layer.name!r} of model {model.name!r} both have a table "
                        f"{table!r}, but a checkpoint identifies tables by name. Give one of them another "
                        "TableConfig.name."
                    )
                owners[table] = layer
    return embeddings
