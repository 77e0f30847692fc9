"""Replaces TFRA's dynamic_embedding module, so that one changed import swaps the layer.

    from tensorflow_recommenders_addons import dynamic_embedding as de       # before
    from tf_fusedrec.tfra import dynamic_embedding as de                     # after

The module replaces these names and forwards every other one to TFRA, which stays unchanged:
  de.keras.layers.HvdAllToAllEmbedding is FusedTfraEmbedding.
  de.keras.callbacks.ModelCheckpoint and DEHvdModelCheckpoint are ModelCheckpoint below.
  de.keras.models.save_model, de_save_model and de_hvd_save_model allow this project's operations.

Its savers make all ranks share one path, one decision and one outcome.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.checkpoint import without_tables
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.collectives import agree
from tf_fusedrec.tfra import native_files
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.tfra_library import de


def with_our_operations(options: tf.saved_model.SaveOptions | None) -> tf.saved_model.SaveOptions:
    """Returns `options` that also allow operations of TFRA and of this project.

    TensorFlow refuses to write operations of an unlisted namespace into a SavedModel.
    """
    options = tf.saved_model.SaveOptions() if options is None else options
    options.namespace_whitelist = sorted({*(options.namespace_whitelist or ()), "TFRA", "Fusedrec"})
    return options


def save_model(
    model: Any, filepath: str, overwrite: bool = True, include_optimizer: bool = True, signatures: Any = None,
    options: tf.saved_model.SaveOptions | None = None, **more: Any,
) -> None:  # fmt: skip
    """Calls de.keras.models.save_model with this project's operations allowed. Collective.

    Native tables have another SavedModel, see native_files.py.
    """
    rows = native_files.native_rows_of(model)
    if rows is not None:
        native_files.save_model(model, rows, collectives.all_gather_object(filepath)[0], signatures)
        return
    options = with_our_operations(options)
    de.keras.models.de_save_model(model, filepath, overwrite, include_optimizer, signatures, options, **more)


class ModelCheckpoint(de.keras.callbacks.DEHvdModelCheckpoint):
    """Replaces de.keras.callbacks.ModelCheckpoint for models with FusedTfraEmbedding or HvdAllToAllEmbedding layers.

    The constructor, the files and their names are upstream's. Three things differ:
      Rank 0's logs decide whether and where all ranks save. Upstream formats the path from each rank's own losses,
        and hangs when only some ranks save.
      save_weights_only writes the rows of all ranks into the TFRADynamicEmbedding folder beside `filepath`, where
        load_weights looks for them.
      A save that fails on one rank fails on all ranks. Upstream hangs.
    """

    def _save_model(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        super()._save_model(epoch, collectives.all_gather_object(numbers)[0])

    def _save_de_model(self, filepath: str) -> None:
        native = native_files.native_rows_of(self.model)
        if native is not None and not self.save_weights_only:
            native_files.save_model(self.model, native, filepath, self._signatures)
            return
        if native is not None:  # first, because TFRA's savers add the rows of other layers
            native_files.save_rows(native, pathlib.Path(filepath).parent / native_files.ROWS)
        with contextlib.nullcontext() if native is None else without_tables():
            agree(lambda: self._save_on_rank_0(filepath) if collectives.rank() == 0 else None)
        agree(lambda: self._save_rows(filepath) if collectives.rank() > 0 else None)

    def _save_on_rank_0(self, filepath: str) -> None:
        if self.save_weights_only:
            self.model.save_weights(filepath, overwrite=True, options=self._options)
        else:
            options = with_our_operations(self._options)
            self.model.save(filepath, overwrite=True, signatures=self._signatures, options=options)

    def _save_rows(self, filepath: str) -> None:
        """Writes this rank's rows and slots. TFRA's hook in TensorFlow's saver writes rank 0's."""
        folder = os.path.dirname(filepath) if self.save_weights_only else os.path.join(filepath, "variables")
        for variable in self.model.variables:
            params = getattr(variable, "params", None)
            layer = getattr(params, "_created_in_class", None)
            if not isinstance(layer, de.keras.layers.HvdAllToAllEmbedding):
                continue
            for table in (params, *layer.optimizer_vars):
                table.save_to_file_system(
                    dirpath=os.path.join(folder, native_files.ROWS),
                    proc_size=collectives.size(),
                    proc_rank=collectives.rank(),
                )


class _Module:
    """An upstream module with some names replaced."""

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
