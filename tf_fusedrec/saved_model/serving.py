"""Switches a model to serving while it is traced: rows from served tables, attention by the chosen kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.embedding import FusedEmbedding, embeddings_of
from tf_fusedrec.embedding.features import pooled_by_tensorflow, restore_form
from tf_fusedrec.layers.kernels import AttentionKernels
from tf_fusedrec.saved_model.lookup import Lookup


@contextlib.contextmanager
def serving(model: keras.Model, lookup: Lookup, kernels: AttentionKernels) -> Iterator[None]:
    """In this context calls of the model use `lookup` and `kernels`, and no collective or training table."""
    layers = list(model.submodules)
    with contextlib.ExitStack() as switches:
        for embedding in embeddings_of(model):
            switches.enter_context(embedding.replacing(answer=functools.partial(_answer, embedding, lookup)))
        for layer in layers:
            if hasattr(layer, "kernels"):
                switches.callback(setattr, layer, "kernels", layer.kernels)
                layer.kernels = kernels
        yield


def _answer(layer: FusedEmbedding, lookup: Lookup, inputs: Any, weights: Any, mask: Any) -> dict[str, Any]:
    """The outputs of a call, with rows from the served tables."""
    flat = layer.flat_features(inputs, weights, mask)
    features = {name: pooled_by_tensorflow(feature) for name, feature in flat.items()}
    rows = lookup.rows([(feature.config.table, feature.ids) for feature in features.values()])
    return {name: restore_form(feature, of_feature) for (name, feature), of_feature in zip(features.items(), rows)}
