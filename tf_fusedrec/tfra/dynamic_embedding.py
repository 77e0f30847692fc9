"""TFRA's dynamic_embedding with this project's parts in their places: the swap as one import.

    from tensorflow_recommenders_addons import dynamic_embedding as de       # before
    from tf_fusedrec.tfra import dynamic_embedding as de                     # after

de.keras.layers.HvdAllToAllEmbedding is FusedEmbedding, de.keras.callbacks.ModelCheckpoint and DEHvdModelCheckpoint are
ModelCheckpoint, de.keras.models.save_model lets our operations be saved; everything else is upstream's. Upstream itself
is not changed.
"""

from __future__ import annotations

from typing import Any

from tf_fusedrec.tables.tfra import de
from tf_fusedrec.tfra.callbacks import ModelCheckpoint, save_model
from tf_fusedrec.tfra.layer import FusedEmbedding


class _Module:
    """A module of upstream's, some names of which are others."""

    def __init__(self, upstream: Any, **instead: Any):
        self.__dict__.update(instead)
        self._upstream = upstream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


_SAVE = ("save_model", "de_save_model", "de_hvd_save_model")
keras = _Module(
    de.keras,
    models=_Module(de.keras.models, **dict.fromkeys(_SAVE, save_model)),
    layers=_Module(de.keras.layers, HvdAllToAllEmbedding=FusedEmbedding),
    callbacks=_Module(
        de.keras.callbacks, ModelCheckpoint=ModelCheckpoint, DEHvdModelCheckpoint=ModelCheckpoint
    ),
)  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(de, name)
