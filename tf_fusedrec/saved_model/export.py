"""export: the model of all ranks becomes one SavedModel."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint.agreement import agree, of_rank_0
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.layers.kernels import FUSED, STOCK
from tf_fusedrec.saved_model import rows
from tf_fusedrec.saved_model.native_tables import NativeTables
from tf_fusedrec.saved_model.serving import serving
from tf_fusedrec.saved_model.signatures import Signature, default_signatures
from tf_fusedrec.saved_model.stock_tables import StockTables

OPS = ("stock", "ours")


def export(
    model: keras.Model,
    path: str | os.PathLike,
    ops: str = "stock",
    *,
    signatures: Mapping[str, Signature] | None = None,
) -> None:
    """Writes the model as a SavedModel for a server. Collective: all ranks call it, rank 0 writes.

    An id that has no row gets a row of zeros. (In training and evaluation it has its initial row.) Rows are in the
    tables' dtype. Rank 0 holds all rows in memory while it writes.

    Args:
      model: with any number of FusedEmbedding layers, of either backend, or none.
      path: folder of the SavedModel, which must not exist; all ranks must see the folder that it lies in.
      ops: "stock": operations of plain TensorFlow only, for any server; tables are sorted ids and rows, attention pads.
        "ours": the process that loads it must have imported tf_fusedrec; tables are hash tables, attention is jagged.
      signatures: by name; None for those of `model.serving_signatures()`, or the inputs and outputs of a functional
        model as "serving_default".

    Raises:
      ValueError: `path` exists, `ops` is neither, no signatures can be told, two layers have tables of one name,
        weights do not exist yet. RuntimeError: another rank has failed.
    """
    path = pathlib.Path(path)
    if ops not in OPS:
        raise ValueError(f"ops must be one of {OPS}, got {ops!r}.")
    if signatures is None:
        signatures = default_signatures(model)
    partial = path.with_name(path.name + ".partial")

    def begin() -> None:
        if path.exists():
            raise ValueError(f"path {os.fspath(path)!r} exists. Remedy: another folder for each export, or remove it.")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "rows").mkdir(parents=True)

    of_rank_0(begin)
    tables = _tables(model)
    for layer in model.submodules:
        if isinstance(layer, FusedEmbedding):
            layer.synchronize()

    def write_rows() -> None:
        for table, (embedding, _) in tables.items():
            rows.write_share(partial / "rows", embedding, table)

    try:
        agree(write_rows)
        of_rank_0(lambda: _write(model, partial, tables, ops, signatures))
        of_rank_0(lambda: (partial / "saved_model").rename(path) and None)
    finally:
        of_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))


def _tables(model: keras.Model) -> dict[str, tuple[FusedEmbedding, str]]:
    """The layer and the dtype of every table, by name."""
    tables: dict[str, tuple[FusedEmbedding, str]] = {}
    for layer in model.submodules:
        if not isinstance(layer, FusedEmbedding):
            continue
        for config in layer.tables:
            if config.name in tables:
                raise ValueError(f"two layers of {model.name!r} have a table {config.name!r}; a server tells by name.")
            tables[config.name] = layer, config.dtype
    return tables


def _write(
    model: keras.Model,
    partial: pathlib.Path,
    tables: Mapping[str, tuple[FusedEmbedding, str]],
    ops: str,
    signatures: Mapping[str, Signature],
) -> None:
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {
        table: rows.read_shares(partial / "rows", table, dtype) for table, (_, dtype) in tables.items()
    }
    served = StockTables(arrays) if ops == "stock" else NativeTables(arrays, partial)
    # The module holds variables only: with the Keras model in it, every layer's training call would be saved too.
    module = tf.Module()
    module.served_tables = served
    weights = {id(v) for v in model.variables} if model.built else set()
    with serving(model, served, STOCK if ops == "stock" else FUSED):
        traced = {name: signature.trace() for name, signature in signatures.items()}
        for name, function in traced.items():
            setattr(module, name, function)  # where keras.layers.TFSMLayer looks for functions of one dict
        module.dense_weights = model.variables
        made = {id(v) for v in module.dense_weights} - weights
        if made:
            names = sorted(v.name for v in module.dense_weights if id(v) in made)
            raise ValueError(
                f"weights {names} of {model.name!r} did not exist before the export: nothing has trained or restored "
                "them. Remedy: call the model on a batch, then train it or load a checkpoint, then export."
            )
        tf.saved_model.save(
            module,
            str(partial / "saved_model"),
            signatures=traced,
            # Gradients of the training path mean nothing to a server.
            options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
        )
