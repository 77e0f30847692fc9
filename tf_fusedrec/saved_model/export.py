"""export: the model of all ranks becomes one SavedModel."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.checkpoint.agreement import agree, of_rank_0
from tf_fusedrec.config import TableConfig
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.layers.kernels import FUSED, STOCK
from tf_fusedrec.saved_model import delta, rows
from tf_fusedrec.saved_model.applying import DESCRIPTION, FORMAT, check_table_name
from tf_fusedrec.saved_model.initial_rows import unknown_rows
from tf_fusedrec.saved_model.native_tables import NativeTables, served_dtype
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
    base: str | os.PathLike | None = None,
) -> None:
    """Writes the model as a SavedModel for a server. Collective: all ranks call it, rank 0 writes.

    With `base`, writes what has changed since: rows, ids that have left, and all that is no row of a table. A server
    makes the full export of both (applying.py). Ranks may be others than those that exported the base.

    An id that has no row gets what it gets in evaluation: TableConfig.unknown says whether its initial row or zeros.
    Rows are in the tables' dtype. Rank 0 holds all rows in memory while it writes.

    Args:
      model: with any number of FusedEmbedding layers, of either backend, or none.
      path: folder of the SavedModel, which must not exist; all ranks must see the folder that it lies in.
      ops: "stock": operations of plain TensorFlow only, for any server; tables are sorted ids and rows, attention pads.
        "ours": the process that loads it must have imported tf_fusedrec; tables are hash tables, attention is jagged.
      signatures: by name; None for those of `model.serving_signatures()`, or the inputs and outputs of a functional
        model as "serving_default".
      base: folder of an earlier full export with the same `ops` and tables, which rank 0 reads; None: a full export.

    Raises:
      ValueError: `path` exists, `ops` is neither, no signatures can be told, two layers have tables of one name, a name
        cannot be that of a file, weights do not exist yet, `base` is no full export, one of other operations or tables,
        or damaged. RuntimeError: another rank has failed.
    """
    path, base = pathlib.Path(path), None if base is None else pathlib.Path(base)
    if ops not in OPS:
        raise ValueError(f"ops is {ops!r}, must be one of {OPS}. Remedy: 'stock' for servers without this package.")
    if signatures is None:
        signatures = default_signatures(model)
    partial = path.with_name(path.name + ".partial")

    def begin() -> None:
        if path.exists():
            raise ValueError(f"path {os.fspath(path)!r} exists. Remedy: another folder for each export, or remove it.")
        if base is not None:
            delta.check_base(base, described)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "rows").mkdir(parents=True)

    tables = _tables(model)
    dtypes = {name: config.dtype if ops == "stock" else served_dtype(config) for name, (_, config) in tables.items()}
    of_tables = {name: {"dim": config.dim, "dtype": dtypes[name]} for name, (_, config) in tables.items()}
    described = {"format": FORMAT, "ops": ops, "tables": of_tables}
    of_rank_0(begin)
    for layer in model.submodules:
        if isinstance(layer, FusedEmbedding):
            layer.synchronize()

    def write_rows() -> None:
        for table, (embedding, _) in tables.items():
            rows.write_share(partial / "rows", embedding, table)

    def finish() -> None:
        if base is not None:
            delta.write_delta(base, partial / "saved_model", partial / "delta")
        (partial / ("saved_model" if base is None else "delta")).rename(path)

    try:
        agree(write_rows)
        of_rank_0(lambda: _write(model, partial, tables, described, signatures))
        of_rank_0(finish)
    finally:
        of_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))


def _tables(model: keras.Model) -> dict[str, tuple[FusedEmbedding, TableConfig]]:
    """The layer and the config of every table, by name."""
    tables: dict[str, tuple[FusedEmbedding, TableConfig]] = {}
    for layer in model.submodules:
        if not isinstance(layer, FusedEmbedding):
            continue
        for config in layer.tables:
            if config.name in tables:
                raise ValueError(
                    f"two layers of {model.name!r} have a table {config.name!r}, and an export knows tables by name. "
                    "Remedy: another name for one of them."
                )
            check_table_name(config.name)
            tables[config.name] = layer, config
    return tables


def _write(
    model: keras.Model,
    partial: pathlib.Path,
    tables: Mapping[str, tuple[FusedEmbedding, TableConfig]],
    described: Mapping[str, Any],
    signatures: Mapping[str, Signature],
) -> None:
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {
        table: rows.read_shares(partial / "rows", table, config.dtype) for table, (_, config) in tables.items()
    }
    seeds = {table: layer.get_config()["seed"] for table, (layer, _) in tables.items()}
    unknown = {table: unknown_rows(config, seeds[table]) for table, (_, config) in tables.items()}
    stock = described["ops"] == "stock"
    served: StockTables | NativeTables
    if stock:
        served = StockTables(arrays, unknown)
    else:
        dtypes = {table: tf.as_dtype(of["dtype"]).as_numpy_dtype for table, of in described["tables"].items()}
        arrays = {table: (ids, of_ids.astype(dtypes[table])) for table, (ids, of_ids) in arrays.items()}
        served = NativeTables(arrays, unknown, {table: config for table, (_, config) in tables.items()}, partial)
    # The module holds variables only: with the Keras model in it, every layer's training call would be saved too.
    module = tf.Module()
    module.served_tables = served
    weights = {id(v) for v in model.variables} if model.built else set()
    with serving(model, served, STOCK if stock else FUSED):
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
    description = partial / "saved_model" / DESCRIPTION
    description.parent.mkdir()
    description.write_text(json.dumps(described, indent=1), encoding="utf-8")
