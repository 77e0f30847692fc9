"""Files of models with fused layers in native tables: TFRA's table files, weights, and a SavedModel that serves.

A SavedModel is that of fr.export, with two further parts in its `variables` folder: TFRADynamicEmbedding has TFRA's
files of all layers, and `keras` has the weights and the optimizer in Keras' format. load_weights of a fused model reads
both.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import types
from typing import Any

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.checkpoint import without_tables
from tf_fusedrec.exchange.collectives import agree, on_rank_0
from tf_fusedrec.saved_model.export import export
from tf_fusedrec.saved_model.signatures import Signature, default_signatures, flat_outputs
from tf_fusedrec.tfra.checkpoints import export_checkpoint, import_checkpoint
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.native_rows import NativeRows

ROWS = "TFRADynamicEmbedding"
_names = keras.src.engine.compile_utils


def save_rows(rows: NativeRows, folder: pathlib.Path) -> None:
    """Replaces a folder by one with TFRA's files of all layers. Collective."""
    part = folder.with_name(f"{folder.name}.partial")
    on_rank_0(lambda: shutil.rmtree(part, ignore_errors=True))
    export_checkpoint(part, rows.embedding, short_file_name=rows.short_file_name)
    on_rank_0(lambda: _replace(folder, part))


def save_model(model: keras.Model, rows: NativeRows, filepath: str, signatures: Any = None) -> None:
    """Writes a SavedModel for inference, which load_weights reads, too. Collective."""
    layers = fused_layers(model)
    if signatures is not None or any(layer.owner is not rows for layer in layers):
        raise ValueError(
            f"model {model.name!r} has native tables, which signatures of its own and layers that fuse left alone "
            f"cannot be saved with, got signatures {signatures} and layers {[layer.name for layer in layers]}. Use "
            "fr.export(model, folder, signatures={name: fr.Signature(function, inputs)}), and fuse all layers."
        )
    path = pathlib.Path(filepath)
    part = path.with_name(f"{path.name}.partial")
    on_rank_0(lambda: shutil.rmtree(part, ignore_errors=True))
    export(model, part, signatures=_signatures(model))
    save_rows(rows, part / "variables" / ROWS)
    with without_tables():
        on_rank_0(lambda: model.save_weights(os.fspath(part / "variables" / "keras")))
    on_rank_0(lambda: _replace(path, part))


def read_rows_with_weights(model: keras.Model, rows: NativeRows) -> None:
    """Makes load_weights read TFRA's files beside the weights. It is collective then."""
    original = model.load_weights

    def load_weights(_: keras.Model, filepath: str, *args: Any, **kwargs: Any) -> Any:
        path = pathlib.Path(filepath)
        folder = path / "variables" / ROWS if path.is_dir() else path.parent / ROWS
        dense = path / "variables" / "keras"
        if dense.with_name("keras.index").exists():
            filepath = os.fspath(dense)
        with without_tables():
            status = agree(lambda: original(filepath, *args, **kwargs))
        import_checkpoint(folder, rows.embedding)
        return status

    model.load_weights = types.MethodType(load_weights, model)


def fused_layers(model: keras.Model) -> list[FusedTfraEmbedding]:
    return [layer for layer in model.submodules if isinstance(layer, FusedTfraEmbedding)]


def native_rows_of(model: keras.Model) -> NativeRows | None:
    """The native rows of a model, or of the model in it that was fused."""
    return next((layer.owner for layer in fused_layers(model) if isinstance(layer.owner, NativeRows)), None)


def _replace(old: pathlib.Path, new: pathlib.Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    new.rename(old)


def _signatures(model: keras.Model) -> dict[str, Signature]:
    """The default signatures of an export, or the inputs of the last call of a subclassed model."""
    if isinstance(model, (keras_api.Functional, keras.Sequential)) or hasattr(model, "serving_signatures"):
        return default_signatures(model)
    spec = model.save_spec()
    if spec is None:
        raise ValueError(f"model {model.name!r} has no inputs yet. Call it on a batch before it is saved.")
    (inputs, *_), _ = spec
    names = _names.create_pseudo_input_names(inputs)
    specs = {name: tf.TensorSpec(part.shape, part.dtype) for name, part in zip(names, tf.nest.flatten(inputs))}

    def function(tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        outputs = model(tf.nest.pack_sequence_as(inputs, [tensors[name] for name in names]), training=False)
        return flat_outputs(outputs, _names.create_pseudo_output_names(outputs))

    return {"serving_default": Signature(function, specs)}
