"""export: writes the model of all ranks as one SavedModel."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, tf
from tf_fusedrec.checkpoint import saving
from tf_fusedrec.checkpoint.dense import ordered_weights
from tf_fusedrec.config import TableConfig
from tf_fusedrec.embedding import CallHooks, FusedEmbedding, embeddings_of
from tf_fusedrec.embedding.features import pooled_by_tensorflow, restore_form
from tf_fusedrec.exchange import collectives, model_state
from tf_fusedrec.exchange.collectives import agree, on_rank_0
from tf_fusedrec.exchange.model_state import average_state, check_equal
from tf_fusedrec.files.hash_order import hash_range_owner
from tf_fusedrec.layers.stock_attention import FUSED, STOCK, AttentionKernels
from tf_fusedrec.saved_model import applying, delta
from tf_fusedrec.saved_model.applying import DESCRIPTION, FORMAT, check_table_name
from tf_fusedrec.saved_model.native_tables import NativeTables, served_dtype
from tf_fusedrec.saved_model.served_rows import ROWS, Lookup, StockTables, encoded, groups_of
from tf_fusedrec.saved_model.signatures import Signature, check_names, default_signatures, taking_strings
from tf_fusedrec.saved_model.stock_initial_rows import unknown_rows
from tf_fusedrec.saved_model.versions import UPDATES, Versions, layout_of, version_of

OPS = ("stock", "ours")
_PARTIAL = ".partial"


def export(
    model: keras.Model,
    folder: str | os.PathLike,
    ops: str = "stock",
    *,
    signatures: Mapping[str, Signature] | None = None,
    strings: Sequence[str] | Mapping[str, bool] = (),
    row_dtype: str | None = None,
    assets: Mapping[str, str] | None = None,
    base: str | os.PathLike | None = None,
) -> None:
    """Writes the model as a SavedModel for a server. Collective: all ranks call it, and rank 0 writes.

    With `base` it writes a delta: changed rows, removed ids, and all dense weights. A running server takes it by the
    signature "apply_delta" (versions.py), or builds the full export from base and delta (applying.py). The base may
    have been exported on another number of ranks.

    An id without a row gets the same row as in evaluation: its initial row or zeros, by TableConfig.unknown. Rank 0
    keeps all rows in memory while it writes.

    Args:
      model: Keras model with any number of FusedEmbedding layers, of either backend, or none.
      folder: Folder of the SavedModel, which must not exist. All ranks must see its parent folder.
      ops: "stock" uses stock TensorFlow ops, for any server; tables are sorted ids and rows, and attention pads.
        "ours" needs a server that has imported tf_fusedrec; tables are hash tables, and attention is jagged.
      signatures: Signatures by name; None: `model.serving_signatures()`, or "serving_default" with the inputs and
        outputs of a functional model.
      strings: Names of int64 inputs that users send as strings. The graph hashes them, as hash_strings. A mapping gives
        the argument `integers` of hash_strings by name: True for ids of data.source: table.
      row_dtype: dtype in which the server keeps the rows of all tables; None: of their table, exactly. "bfloat16":
        relative error at most 2^-8, also of initial rows. "int8": a scale per row, its largest absolute value / 127;
        the error of a number is at most half the scale. The model gets rows in the dtype of their table.
      assets: Text of more files for assets.extra/, by name. A delta needs those of its base.
      base: Folder of an earlier full export with the same `ops`, tables and `row_dtype`, which rank 0 reads; None: a
        full export.

    Raises:
      ValueError: `folder` exists; `ops` or `row_dtype` is unknown; a row or a dense weight is not finite; `strings`
        names no int64 input; the model has no signatures; two layers have tables of one name; a table's name cannot
        name a file; weights do not exist yet, or a signature uses their variables instead of their values; a signature
        has the name of one for updates, or has resources and `ops` is "stock"; `base` is damaged, not a full export,
        or has other ops, tables or row_dtype.
      RuntimeError: another rank failed, or ranks hold different models.

    Examples:
      >>> inputs = {"item": tf.TensorSpec([None], tf.int64)}
      >>> signatures = {"score": fr.Signature(lambda tensors: {"score": model(tensors)}, inputs)}
      >>> fr.export(model, "base", signatures=signatures)
      >>> served = tf.saved_model.load("base").signatures["score"]
      >>> served(item=tf.constant([1, 2], tf.int64))["score"].shape
      TensorShape([2, 1])
      >>> fr.export(model, "delta", signatures=signatures, base="base")  # the changes since the export "base"
      >>> fr.apply_delta("base", "delta", "new")
    """
    path, base = pathlib.Path(folder), None if base is None else pathlib.Path(base)
    if ops not in OPS:
        raise ValueError(f"ops is {ops!r}, must be one of {OPS}. Use 'stock' for servers without this package.")
    if row_dtype not in ROWS:
        raise ValueError(f"row_dtype must be one of {ROWS}, got {row_dtype!r}. Use None for the dtype of each table.")
    if signatures is None:
        signatures = default_signatures(model)
    check_names(signatures)
    signatures = taking_strings(signatures, strings)
    stateful = [name for name, signature in signatures.items() if signature.resources]
    if stateful and ops == "stock":
        raise ValueError(
            f"ops is 'stock', but the signatures {stateful} have resources, which need this package on the server. "
            "Use ops='ours', or signatures without a StateCache."
        )
    for name in sorted(set(signatures) & set(UPDATES)):
        raise ValueError(f"signature {name!r} has the name of one for updates. Use a name other than {UPDATES}.")

    def begin() -> str:
        if path.exists():
            raise ValueError(f"folder {os.fspath(path)!r} exists. Use another folder for each export, or remove it.")
        if base is not None:
            delta.check_base(base, described)
        _remove_remains(path)
        name = f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}"
        (path.with_name(name) / "rows").mkdir(parents=True)
        return name

    tables = _tables(model)
    forms = {
        name: {"dim": config.dim, "dtype": row_dtype or (config.dtype if ops == "stock" else served_dtype(config))}
        for name, (_, config) in tables.items()
    }
    described = {"format": FORMAT[ops], "ops": ops, "tables": forms}
    if hasattr(model, "drain"):
        model.drain()
    average_state(model)
    check_equal(model, "at the export", state=True)
    partial = path.with_name(on_rank_0(begin))
    for layer in embeddings_of(model):
        layer.synchronize()

    def write_rows() -> None:
        for table, (embedding, _) in tables.items():
            write_rank_rows(partial / "rows", embedding, table)

    def finish() -> None:
        if base is not None:
            weights = [weight.numpy() for weight in [*ordered_weights(model), *_further_weights(signatures)]]
            delta.write_delta(base, partial / "saved_model", partial / "delta", weights)
        (partial / ("saved_model" if base is None else "delta")).rename(path)

    try:
        agree(write_rows)
        on_rank_0(lambda: _write(model, partial, tables, row_dtype, described, signatures, assets or {}))
        on_rank_0(finish)
    finally:
        on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))


def _remove_remains(path: pathlib.Path) -> None:
    """Removes the folders of killed exports to `path`: they have an export's name and only its parts."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{32}" + re.escape(_PARTIAL))
    parts = re.compile(r"rows|saved_model|delta|.+\.rows", re.DOTALL)
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        named = name.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if named and all(parts.fullmatch(entry.name) for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)


def _tables(model: keras.Model) -> dict[str, tuple[FusedEmbedding, TableConfig]]:
    """Layer and config of every table, by the table's name."""
    tables: dict[str, tuple[FusedEmbedding, TableConfig]] = {}
    for layer in embeddings_of(model):
        for config in layer.tables:
            if config.name in tables:
                raise ValueError(
                    f"two layers of {model.name!r} have a table {config.name!r}, but an export identifies tables by "
                    "name. Use another name for one of them."
                )
            check_table_name(config.name)
            tables[config.name] = layer, config
    return tables


def _further_weights(signatures: Mapping[str, Signature]) -> list[tf.Variable]:
    return list({id(weight): weight for signature in signatures.values() for weight in signature.weights}.values())


def _write(
    model: keras.Model,
    partial: pathlib.Path,
    tables: Mapping[str, tuple[FusedEmbedding, TableConfig]],
    row_dtype: str | None,
    described: Mapping[str, Any],
    signatures: Mapping[str, Signature],
    assets: Mapping[str, str],
) -> None:
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for table, (_, config) in tables.items():
        ids, numbers = read_all_rows(partial / "rows", table, config.dtype)
        arrays[table] = ids, encoded(table, ids, numbers, described["tables"][table]["dtype"])
    seeds = {table: layer.get_config()["seed"] for table, (layer, _) in tables.items()}
    unknown = {table: unknown_rows(config, seeds[table], row_dtype) for table, (_, config) in tables.items()}
    groups = groups_of(described["tables"])
    stock = described["ops"] == "stock"
    served: StockTables | NativeTables
    if stock:
        served = StockTables(arrays, groups)
    else:
        served = NativeTables(arrays, unknown, {table: config for table, (_, config) in tables.items()}, partial)
    further = _further_weights(signatures)
    weights = [*(ordered_weights(model) if model.built else ()), *further]
    not_finite = saving.non_finite_weight(list(model_state.values_of(weights)))
    if not_finite:
        raise ValueError(
            f"{not_finite} is not finite. Load an earlier save (checkpoint.saves lists them), and look for the "
            "cause, such as a learning rate that is too high or a NaN in the data."
        )
    dtypes_of_model = {table: config.dtype for table, (_, config) in tables.items()}
    versions, lookup = Versions(weights, groups), Lookup(served, unknown, groups, dtypes_of_model)
    # The module has variables only. With the Keras model in it, TensorFlow would save every layer's training call.
    module = tf.Module()
    module.served_tables = served
    module.resources = list(dict.fromkeys(used for signature in signatures.values() for used in signature.resources))
    with serving(model, lookup, STOCK if stock else FUSED):
        traced = {name: versions.answering(signature, lookup).trace() for name, signature in signatures.items()}
        module.dense_weights = [*ordered_weights(model), *further]
        created = {id(v) for v in module.dense_weights} - {id(v) for v in weights}
        if created:
            names = sorted(v.name for v in module.dense_weights if id(v) in created)
            raise ValueError(
                f"weights {names} of {model.name!r} did not exist before the export, so they are neither trained nor "
                "restored. Call the model on a batch, then train it or load a checkpoint, then export."
            )
        for name, function in traced.items():
            versions.check(name, function)
        layout = layout_of(described["tables"], weights, traced, assets)
        as_bytes = {table: (ids, applying.bytes_of(encoded_rows)) for table, (ids, encoded_rows) in arrays.items()}
        version = version_of(layout, as_bytes, weights)
        updates = versions.signatures(version, layout)
        traced.update({name: signature.trace() for name, signature in updates.items()})
        for name, function in traced.items():
            setattr(module, name, function)  # keras.layers.TFSMLayer looks for functions in attributes.
        module.versions = versions
        tf.saved_model.save(
            module,
            str(partial / "saved_model"),
            signatures=traced,
            # A server computes no gradients.
            options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
        )
    description = partial / "saved_model" / DESCRIPTION
    description.parent.mkdir()
    described = {**described, "version": version, "layout": layout}
    for name, text in {**assets, description.name: json.dumps(described, indent=1)}.items():
        description.with_name(name).write_text(text, encoding="utf-8")


def write_rank_rows(folder: pathlib.Path, embedding: FusedEmbedding, table: str) -> None:
    """Writes this rank's rows of one table. Ranks with replicas of the same rows write a part each."""
    ids, rows = embedding.export_table(table)
    if embedding.layout.replicas.size > 1:
        kept = hash_range_owner(ids, collectives.size()) == embedding.layout.piece
        ids, rows = ids[kept], rows[kept]
    if rows.dtype == tf.bfloat16.as_numpy_dtype:  # NumPy would write it as untyped bytes.
        rows = rows.view(np.uint16)
    for part, array in (("ids", ids), ("rows", rows)):
        np.save(folder / f"{table}.{part}.{collectives.rank()}.npy", array)


def read_all_rows(folder: pathlib.Path, table: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads ids <int64>[n], ascending, and rows <dtype>[n, D] of all ranks."""
    ids, rows = (
        np.concatenate([np.load(folder / f"{table}.{part}.{rank}.npy") for rank in range(collectives.size())])
        for part in ("ids", "rows")
    )
    order = np.argsort(ids)
    return ids[order], rows[order].view(tf.as_dtype(dtype).as_numpy_dtype)


@contextlib.contextmanager
def serving(model: keras.Model, lookup: Lookup, kernels: AttentionKernels) -> Iterator[None]:
    """In this context calls of the model read `lookup` and use `kernels`, with no collective or training table."""
    layers = list(keras_api.modules_of(model))
    with contextlib.ExitStack() as switches:
        for embedding in embeddings_of(model):
            switches.enter_context(embedding.internals.using(_ServedRows(lookup)))
        for layer in layers:
            if hasattr(layer, "kernels"):
                switches.callback(setattr, layer, "kernels", layer.kernels)
                layer.kernels = kernels
        yield


class _ServedRows(CallHooks):
    """Calls get rows of the served tables."""

    def __init__(self, lookup: Lookup):
        self._lookup = lookup

    def call(self, layer: FusedEmbedding, inputs: Any, weights: Any, mask: Any, *, training: bool) -> dict[str, Any]:
        flat = layer.internals.flat_features(inputs, weights, mask)
        features = {name: pooled_by_tensorflow(feature) for name, feature in flat.items()}
        rows = self._lookup.rows([(feature.config.table_name, feature.ids) for feature in features.values()])
        return {name: restore_form(feature, part) for (name, feature), part in zip(features.items(), rows)}
