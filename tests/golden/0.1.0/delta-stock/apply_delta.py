"""A server's side of delta exports: a full export and a delta of it become the next full export.

    python exports/1-to-2/apply_delta.py exports/1 exports/1-to-2 exports/2      # base, delta, output
    tf_fusedrec.apply_delta("exports/1", "exports/1-to-2", "exports/2")          # the same

A delta is no SavedModel but holds one without rows, with all dense weights; the rows that have changed; and a copy of
this file, which therefore imports TensorFlow and NumPy alone (of any version of Keras):

    delta.json                    {"format", "ops", "tables": {name: {"dim", "dtype"}}, "base" and "result": digests}
    model/                        the next export, without rows of tables
    changes/<table>.ids.npy       <int64>[n], ascending: rows that are new or have changed
    changes/<table>.rows.npy      <uint8>[n, bytes of a row]
    changes/<table>.removed.npy   <int64>[m], ascending: ids that have no row any more
    apply_delta.py                this file

Rows are compared and carried as bytes, so what comes out equals the full export bit by bit; digests are of all ids and
rows of a table, so another base, or a damaged file, is told before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import sys

import numpy as np
import tensorflow as tf

FORMAT = 1
DESCRIPTION = pathlib.Path("assets.extra/tables.json")  # of a full export; SavedModel keeps this folder for its users
_BUNDLE = pathlib.Path("variables/variables")
_ID_BYTES = 8


def apply_delta(base: str | os.PathLike, delta: str | os.PathLike, output: str | os.PathLike) -> None:
    """Writes the full export that `delta` was made of. Needs memory for all rows, twice for one table.

    Args:
      base: folder of the full export that the delta starts from.
      delta: folder that `export(..., base=...)` wrote.
      output: folder to write, which must not exist.

    Raises:
      ValueError: `output` exists, `delta` is none, it starts from another base, or its files are damaged.
    """
    base, delta, output = (pathlib.Path(path) for path in (base, delta, output))
    if output.exists():
        raise ValueError(f"output {os.fspath(output)!r} exists. Remedy: another folder, or remove it.")
    if not (delta / "delta.json").exists():
        raise ValueError(f"delta {os.fspath(delta)!r} holds no delta.json. Remedy: what export(..., base=...) wrote.")
    told = json.loads((delta / "delta.json").read_text(encoding="utf-8"))
    described = describe(base)
    if described != {name: told[name] for name in described}:
        raise ValueError(_wrong_base(base, delta, f"the base has {described}"))
    tables = read_tables(base)
    for name, (ids, rows) in tables.items():
        if digest(ids, rows) != told["base"][name]:
            raise ValueError(_wrong_base(base, delta, f"the rows of table {name!r} are others"))
        changes = (np.load(delta / "changes" / f"{name}.{what}.npy") for what in ("ids", "rows", "removed"))
        tables[name] = _merged(ids, rows, *changes)
        if digest(*tables[name]) != told["result"][name]:
            raise ValueError(f"changes of table {name!r} in {os.fspath(delta)!r} are damaged. Remedy: copy it again.")
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(delta / "model", partial)
    put_tables(partial, tables)
    partial.rename(output)


def _wrong_base(base: pathlib.Path, delta: pathlib.Path, why: str) -> str:
    return (
        f"delta {os.fspath(delta)!r} does not start from base {os.fspath(base)!r}: {why}. Remedy: the base that was "
        "given to export, or a full export."
    )


def describe(export: pathlib.Path) -> dict:
    """{"format", "ops", "tables": {name: {"dim", "dtype"}}} of a full export.

    Raises:
      ValueError: it is none, or of another format.
    """
    if (export / "delta.json").exists():
        raise ValueError(
            f"base {os.fspath(export)!r} is a delta. Remedy: the full export that apply_delta makes of it."
        )
    if not (export / DESCRIPTION).exists():
        raise ValueError(f"base {os.fspath(export)!r} is no export: it has no {DESCRIPTION}. Remedy: a full export.")
    described = json.loads((export / DESCRIPTION).read_text(encoding="utf-8"))
    if described["format"] != FORMAT:
        raise ValueError(
            f"base {os.fspath(export)!r} has format {described['format']}, want {FORMAT}. Remedy: a full export."
        )
    return described


def digest(ids: np.ndarray, rows: np.ndarray) -> str:
    """Of all ids <int64>[n] and rows <uint8>[n, bytes] of a table."""
    hashed = hashlib.blake2b(np.ascontiguousarray(ids, "<i8").data, digest_size=16)
    hashed.update(np.ascontiguousarray(rows).data)
    return hashed.hexdigest()


def read_tables(export: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """ids <int64>[n], ascending, and rows <uint8>[n, bytes] of every table of a full export."""
    described = describe(export)
    tables = {}
    for name, table in described["tables"].items():
        row_bytes = table["dim"] * tf.as_dtype(table["dtype"]).size
        if described["ops"] == "ours":
            records = np.fromfile(_record_file(export, name), np.uint8).reshape(-1, _ID_BYTES + row_bytes)
            ids = np.ascontiguousarray(records[:, :_ID_BYTES]).view("<i8")[:, 0]
            tables[name] = ids, records[:, _ID_BYTES:]
        else:
            bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
            ids, rows = (bundle.get_tensor(key)[:-1] for key in _keys(name))  # the last one is the default row
            tables[name] = ids, np.ascontiguousarray(rows).view(np.uint8).reshape(-1, row_bytes)
    return tables


def _merged(
    ids: np.ndarray, rows: np.ndarray, changed: np.ndarray, changed_rows: np.ndarray, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isin(ids, np.concatenate([changed, removed]))
    ids = np.concatenate([ids[kept], changed])
    order = np.argsort(ids)
    return ids[order], np.concatenate([rows[kept], changed_rows])[order]


def take_tables(export: pathlib.Path) -> None:
    """Removes the rows of all tables from a full export, which cannot be loaded until put_tables."""
    described = describe(export)
    if described["ops"] == "ours":
        for name in described["tables"]:
            _record_file(export, name).unlink()
        return
    keys = {key for name in described["tables"] for key in _keys(name)}
    _write_bundle(export, {name: value for name, value in _read_bundle(export).items() if name not in keys})


def put_tables(export: pathlib.Path, tables: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Gives an export without tables those of read_tables."""
    described = describe(export)
    if described["ops"] == "ours":
        for name, (ids, rows) in tables.items():
            keys = np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(-1, _ID_BYTES)
            np.concatenate([keys, rows], axis=1).tofile(_record_file(export, name))
        return
    tensors = _read_bundle(export)
    for name, (ids, rows) in tables.items():
        dtype = tf.as_dtype(described["tables"][name]["dtype"]).as_numpy_dtype
        # The default row, as StockTables has it: its id repeats the largest.
        last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
        values = np.concatenate([ids, last]), np.concatenate([rows, np.zeros([1, rows.shape[1]], np.uint8)]).view(dtype)
        tensors.update(zip(_keys(name), values))
    _write_bundle(export, tensors)


def _record_file(export: pathlib.Path, table: str) -> pathlib.Path:
    return export / "assets" / f"{table}.rows"


def _keys(table: str) -> tuple[str, str]:
    """Names of a table's ids and rows in the checkpoint of a SavedModel, which escapes '.'."""
    of_table = f"served_tables/_tables/{table.replace('.', '..')}"
    return f"{of_table}/0/.ATTRIBUTES/VARIABLE_VALUE", f"{of_table}/1/.ATTRIBUTES/VARIABLE_VALUE"


def _read_bundle(export: pathlib.Path) -> dict:
    bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
    return {name: bundle.get_tensor(name) for name in bundle.get_variable_to_shape_map()}


def _write_bundle(export: pathlib.Path, tensors: dict) -> None:
    shutil.rmtree(export / _BUNDLE.parent)
    (export / _BUNDLE.parent).mkdir()
    names = sorted(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(export / _BUNDLE),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} BASE DELTA OUTPUT")
    try:
        apply_delta(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
