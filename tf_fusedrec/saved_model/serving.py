"""While a model is traced for a server: rows come from tables that are served, attention from the kernels chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Union

from tf_fusedrec._tf_compat import keras
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.layers.kernels import AttentionKernels
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.stock_tables import StockTables

ServedTables = Union[StockTables, NativeTables]


@contextlib.contextmanager
def serving(model: keras.Model, tables: ServedTables, kernels: AttentionKernels) -> Iterator[None]:
    """Inside, calls of the model are for a server: no collective, no table of training, attention by `kernels`."""
    layers = list(model.submodules)
    with contextlib.ExitStack() as changed:
        for layer in layers:
            if isinstance(layer, FusedEmbedding):
                changed.enter_context(layer.served_by(tables.rows))
            elif hasattr(layer, "kernels"):
                changed.callback(setattr, layer, "kernels", layer.kernels)
                layer.kernels = kernels
        yield
