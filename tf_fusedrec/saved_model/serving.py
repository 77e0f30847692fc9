"""Switches a model to serving while it is traced: rows from served tables, attention by the chosen kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Union

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.embedding import embeddings_of
from tf_fusedrec.layers.kernels import AttentionKernels
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.stock_tables import StockTables

ServedTables = Union[StockTables, NativeTables]


@contextlib.contextmanager
def serving(model: keras.Model, tables: ServedTables, kernels: AttentionKernels) -> Iterator[None]:
    """In this context calls of the model use `tables` and `kernels`, and no collective or training table."""
    layers = list(model.submodules)
    with contextlib.ExitStack() as switches:
        for embedding in embeddings_of(model):
            switches.enter_context(embedding.served_by(tables.rows))
        for layer in layers:
            if hasattr(layer, "kernels"):
                switches.callback(setattr, layer, "kernels", layer.kernels)
                layer.kernels = kernels
        yield
