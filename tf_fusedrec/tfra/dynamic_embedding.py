"""Stands in for TFRA's dynamic_embedding module, so that one changed import swaps the layer.

    from tensorflow_recommenders_addons import dynamic_embedding as de       # before
    from tf_fusedrec.tfra import dynamic_embedding as de                     # after

The module replaces these names and forwards every other one to TFRA, which stays unchanged:
  de.keras.layers.HvdAllToAllEmbedding is FusedTfraEmbedding.
  de.keras.callbacks.ModelCheckpoint and DEHvdModelCheckpoint are tf_fusedrec.tfra.ModelCheckpoint.
  de.keras.models.save_model, de_save_model and de_hvd_save_model allow this project's operations.
"""

from __future__ import annotations

from typing import Any

from tf_fusedrec.tables.tfra_library import de
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.model_checkpoint import ModelCheckpoint, save_model


class _Module:
    """An upstream module with some names replaced.

    Args:
      upstream: The module that answers every other name.
      **replacements: New values by name.
    """

    def __init__(self, upstream: Any, **replacements: Any):
        self.__dict__.update(replacements)
        self._upstream = upstream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


_SAVE = ("save_model", "de_save_model", "de_hvd_save_model")
keras = _Module(
    de.keras,
    models=_Module(de.keras.models, **dict.fromkeys(_SAVE, save_model)),
    layers=_Module(de.keras.layers, HvdAllToAllEmbedding=FusedTfraEmbedding),
    callbacks=_Module(
        de.keras.callbacks, ModelCheckpoint=ModelCheckpoint, DEHvdModelCheckpoint=ModelCheckpoint
    ),
)  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(de, name)
