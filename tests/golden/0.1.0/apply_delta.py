"""A server's side of delta exports: a full export and a delta of it become the next full export.

    python exports/1-to-2/apply_delta.py exports/1 exports/1-to-2 exports/2      # base, delta, output
    tf_fusedrec.apply_delta("exports/1", "exports/1-to-2", "exports/2")          # the same

A delta is no SavedModel but holds one without rows, with all dense weights; the rows that have changed; and a copy of
this file, which therefore imports TensorFlow and NumPy alone (of any version of Keras):

    delta.json                    {"format", "ops", "tables": {name: {"dim", "dtype"}}, "base" and "result": digests,
                                   "files": {path: [bytes, checksum]} of all other files}
    model/                        the next export, without rows of tables
    changes/<table>.ids.npy       <int64>[n], ascending: rows that are new or have changed
    changes/<table>.rows.npy      <uint8>[n, bytes of a row]
    changes/<table>.removed.npy   <int64>[m], ascending: ids that have no row any more
    apply_delta.py                this file

Rows are compared and carried as bytes, so what comes out equals the full export bit by bit. Digests are of all ids and
rows of a table. All files, and what becomes of them, are verified before the first byte is written.

An export with ops="ours" keeps its rows in assets/<table>.rows: a header of 24 bytes [mark | rows <uint64> | checksum],
then records [id <int64> | row] by ascending id. The server's own graph verifies it (native_tables.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
import uuid
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

FORMAT = 2
DESCRIPTION = pathlib.Path("assets.extra/tables.json")  # of a full export; SavedModel keeps this folder for its users
HEADER_BYTES = 24
BLOCK_ROWS = 1 << 16  # records whose fingerprints make one step of a checksum
ID_BYTES = 8
_DTYPES = ("float32", "float16", "bfloat16")
_MARK = b"fr.rows\x02"
_BUNDLE = pathlib.Path("variables/variables")
_COPY = "Remedy: copy it again."


def apply_delta(base: str | os.PathLike, delta: str | os.PathLike, output: str | os.PathLike) -> None:
    """Writes the full export that `delta` was made of. Needs memory for all rows, twice for one table.

    Args:
      base: folder of the full export that the delta starts from.
      delta: folder that `export(..., base=...)` wrote.
      output: folder to write, which must not exist.

    Raises:
      ValueError: `output` exists, `delta` is none, it starts from another base, or a file is damaged, missing or
        outside its folder. OSError: `output` cannot be written. Either names the file; nothing is left of `output`.
    """
    base, delta, output = (pathlib.Path(path) for path in (base, delta, output))
    if os.path.lexists(output):
        raise ValueError(f"output {os.fspath(output)!r} exists. Remedy: another folder, or remove it.")
    told = _read_delta(delta)
    described = describe(base)
    if described != {name: told[name] for name in described}:
        raise ValueError(_wrong_base(base, delta, f"the base has {described}"))
    if describe(delta / "model") != described:
        raise ValueError(f"file {os.fspath(delta / 'model' / DESCRIPTION)!r} is not as delta.json says. {_COPY}")
    tables = read_tables(base)
    for name, (ids, rows) in tables.items():
        if digest(ids, rows) != told["base"][name]:
            raise ValueError(_wrong_base(base, delta, f"the rows of table {name!r} are others"))
        changes = _read_changes(delta, name, rows.shape[1])
        tables[name] = _merged(ids, rows, *changes)
        if digest(*tables[name]) != told["result"][name]:
            files = os.fspath(delta / "changes" / name) + ".*.npy"
            raise ValueError(f"{files} do not make the rows that {os.fspath(delta)!r} promises. {_COPY}")
    partial = output.with_name(f"{output.name}.{uuid.uuid4().hex}.partial")
    try:
        for path in told["files"]:
            if path.startswith("model/"):
                to = partial / pathlib.PurePosixPath(path).relative_to("model")
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(delta / path, to)
        put_tables(partial, tables)
        partial.rename(output)
    except (OSError, tf.errors.OpError) as error:
        raise OSError(
            f"output {os.fspath(output)!r} cannot be written, and nothing is left of it: {error}. Remedy: room and "
            "rights there, then apply the delta again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wrong_base(base: pathlib.Path, delta: pathlib.Path, why: str) -> str:
    return (
        f"delta {os.fspath(delta)!r} does not start from base {os.fspath(base)!r}: {why}. Remedy: the base that was "
        "given to export, or a full export."
    )


def _read_delta(delta: pathlib.Path) -> dict:
    """delta.json, when all files are there, inside the folder, and undamaged."""
    path = delta / "delta.json"
    if not path.exists():
        raise ValueError(f"delta {os.fspath(delta)!r} holds no delta.json. Remedy: what export(..., base=...) wrote.")
    told = _read_description(path)
    with _named(path):
        files, tables = told["files"], set(told["tables"])
        if not all(set(told[digests]) == tables for digests in ("base", "result")):
            raise ValueError("digests of other tables")
        if not all(len(file) == 2 for file in files.values()):
            raise ValueError("'files' must be of [bytes, checksum]")
    wanted = {f"changes/{name}.{what}.npy" for name in tables for what in ("ids", "rows", "removed")}
    found = {file.relative_to(delta).as_posix() for part in ("model", "changes") for file in _files_below(delta / part)}
    for name in sorted({*found, *wanted} - set(files)):
        raise ValueError(f"file {os.fspath(delta / name)!r} is none that delta.json names. Remedy: remove it.")
    for name, (size, checksum) in files.items():
        file = inside(delta, name)
        if [file.stat().st_size, checksum_of(file)] != [size, checksum]:
            has = f"{file.stat().st_size} bytes, another checksum than those {size} that delta.json names"
            raise ValueError(f"file {os.fspath(file)!r} is damaged: it has {has}. {_COPY}")
    return told


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Errors of reading inside become ValueErrors that name the file."""
    try:
        yield
    except Exception as error:  # readers of JSON, NumPy and TensorFlow have some dozen for damaged bytes
        why = error if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"file {os.fspath(path)!r} is damaged: {why}. {_COPY}") from error


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    return [pathlib.Path(root) / name for root, _, names in os.walk(folder) for name in names]


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The regular file `name`, a relative path with '/', of a folder.

    Raises:
      ValueError: it is not there, or is outside of the folder, by its name or by a link.
    """
    path = folder / name
    top = os.path.realpath(folder)
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts) or (
        os.path.commonpath([top, os.path.realpath(path)]) != top
    ):
        raise ValueError(f"file {os.fspath(path)!r} is outside of {os.fspath(folder)!r}. Remedy: files, not links.")
    if not path.is_file():
        raise ValueError(f"file {os.fspath(path)!r} is missing. {_COPY}")
    return path


def checksum_of(path: pathlib.Path) -> str:
    """Of all bytes of a file."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            hashed.update(block)
    return hashed.hexdigest()


def check_table_name(name: str) -> None:
    """Raises ValueError unless files can have the table's name: no separators, not '.' or '..'."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
        raise ValueError(
            f"table name {name!r} cannot be that of a file. Remedy: a name without separators, other than '.' and '..'."
        )


def describe(export: pathlib.Path) -> dict:
    """{"format", "ops", "tables": {name: {"dim", "dtype"}}} of a full export.

    Raises:
      ValueError: it is none, or of another format, or its description is damaged.
    """
    if (export / "delta.json").exists():
        raise ValueError(
            f"base {os.fspath(export)!r} is a delta. Remedy: the full export that apply_delta makes of it."
        )
    if not (export / DESCRIPTION).exists():
        raise ValueError(f"base {os.fspath(export)!r} is no export: it has no {DESCRIPTION}. Remedy: a full export.")
    described = _read_description(inside(export, DESCRIPTION.as_posix()))
    return {name: described[name] for name in ("format", "ops", "tables")}


def _read_description(path: pathlib.Path) -> dict:
    with _named(path):
        described = json.loads(path.read_text(encoding="utf-8"))
        found = described["format"]
        if found == FORMAT and described["ops"] not in ("stock", "ours"):
            raise ValueError(f"it has ops {described['ops']!r}, want 'stock' or 'ours'")
        for name, table in described["tables"].items() if found == FORMAT else ():
            check_table_name(name)
            if type(table["dim"]) is not int or table["dim"] < 1 or table["dtype"] not in _DTYPES:
                raise ValueError(f"table {name!r} is described as {table}")
    if found != FORMAT:
        raise ValueError(f"file {os.fspath(path)!r} has format {found}, want {FORMAT}. Remedy: a full export of today.")
    return described


def digest(ids: np.ndarray, rows: np.ndarray) -> str:
    """Of all ids <int64>[n] and rows <uint8>[n, bytes] of a table."""
    hashed = hashlib.blake2b(np.ascontiguousarray(ids, "<i8").data, digest_size=16)
    hashed.update(np.ascontiguousarray(rows).data)
    return hashed.hexdigest()


def read_tables(export: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """ids <int64>[n], ascending, and rows <uint8>[n, bytes] of every table of a full export.

    Raises:
      ValueError: a file is damaged, missing, or outside of the folder.
    """
    described = describe(export)
    tables = {}
    for name, table in described["tables"].items():
        row_bytes = table["dim"] * tf.as_dtype(table["dtype"]).size
        if described["ops"] == "ours":
            tables[name] = _read_records(inside(export, record_file(name)), name, row_bytes)
            continue
        for part in _files_below(export / _BUNDLE.parent):
            inside(export, part.relative_to(export).as_posix())
        with _named(export / _BUNDLE):  # TensorFlow verifies a checksum of each tensor
            bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
            ids, rows = (bundle.get_tensor(key)[:-1] for key in keys_of(name))  # the last one is the default row
            tables[name] = ids, np.ascontiguousarray(rows).view(np.uint8).reshape(-1, row_bytes)
    return tables


def _read_changes(delta: pathlib.Path, table: str, row_bytes: int) -> list[np.ndarray]:
    """Ids, rows and removed ids of a table's changes."""
    arrays: list[np.ndarray] = []
    for what, dtype, shape in (("ids", np.int64, ()), ("rows", np.uint8, (row_bytes,)), ("removed", np.int64, ())):
        path = inside(delta, f"changes/{table}.{what}.npy")
        with _named(path):
            array = np.load(path)
            if array.dtype != dtype or array.shape[1:] != shape or (what == "rows" and len(array) != len(arrays[0])):
                raise ValueError(f"it has {array.dtype} of shape {array.shape}")
        arrays.append(array)
    return arrays


def _merged(
    ids: np.ndarray, rows: np.ndarray, changed: np.ndarray, changed_rows: np.ndarray, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isin(ids, np.concatenate([changed, removed]))
    ids = np.concatenate([ids[kept], changed])
    order = np.argsort(ids)
    return ids[order], np.concatenate([rows[kept], changed_rows])[order]


def put_tables(export: pathlib.Path, tables: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Gives an export without tables those of read_tables."""
    described = describe(export)
    if described["ops"] == "ours":
        (export / "assets").mkdir(exist_ok=True)
        for name, (ids, rows) in tables.items():
            write_records(export / record_file(name), name, ids, rows)
        return
    tensors = read_bundle(export)
    for name, (ids, rows) in tables.items():
        dtype = tf.as_dtype(described["tables"][name]["dtype"]).as_numpy_dtype
        # The default row, as StockTables has it: its id repeats the largest.
        last = ids[-1:] if len(ids) else np.array([np.iinfo(np.int64).max])
        values = np.concatenate([ids, last]), np.concatenate([rows, np.zeros([1, rows.shape[1]], np.uint8)]).view(dtype)
        tensors.update(zip(keys_of(name), values))
    write_bundle(export, tensors)


# Files of rows. The checksum is made of operations that a server's graph has, too: TensorFlow's fingerprint of records.


def first_checksum(table: str, row_bytes: int) -> tf.Tensor:
    """Checksum <uint8>[8] of no records of a table."""
    return _fingerprint(tf.constant([list(f"{table}/{row_bytes}".encode())], tf.uint8))[0]


def next_checksum(checksum: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    """Checksum <uint8>[8] with one more block of records <uint8>[n, bytes]: BLOCK_ROWS of them but for the last."""
    return _fingerprint(tf.concat([checksum, tf.reshape(_fingerprint(records), [-1])], axis=0)[tf.newaxis])[0]


def header_of(rows: tf.Tensor, checksum: tf.Tensor) -> tf.Tensor:
    """<uint8>[HEADER_BYTES] of a file of `rows` <int64>[] records."""
    return tf.concat([tf.constant(list(_MARK), tf.uint8), tf.bitcast(rows, tf.uint8), checksum], axis=0)


def _fingerprint(data: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Fingerprint(data=data, method="farmhash64")


def write_records(path: pathlib.Path, table: str, ids: np.ndarray, rows: np.ndarray) -> None:
    """Writes the file of a table's rows <uint8>[n, bytes]."""
    records = np.empty([len(ids), ID_BYTES + rows.shape[1]], np.uint8)
    records[:, :ID_BYTES] = ids.astype("<i8").view(np.uint8).reshape(-1, ID_BYTES)
    records[:, ID_BYTES:] = rows
    with path.open("wb") as file:
        file.write(_header(table, records))
        records.tofile(file)


def _header(table: str, records: np.ndarray) -> bytes:
    with tf.device("/CPU:0"):
        checksum = first_checksum(table, records.shape[1] - ID_BYTES)
        for begin in range(0, len(records), BLOCK_ROWS):
            checksum = next_checksum(checksum, tf.constant(records[begin : begin + BLOCK_ROWS]))
        return header_of(tf.constant(len(records), tf.int64), checksum).numpy().tobytes()


def _read_records(path: pathlib.Path, table: str, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    with _named(path):
        data = np.fromfile(path, np.uint8)
        records = data[HEADER_BYTES:].reshape(-1, ID_BYTES + row_bytes)
        if data[:HEADER_BYTES].tobytes() != _header(table, records):
            raise ValueError(f"its {len(records)} rows have another checksum than its header says")
    return np.ascontiguousarray(records[:, :ID_BYTES]).view("<i8")[:, 0], records[:, ID_BYTES:]


def record_file(table: str) -> str:
    return f"assets/{table}.rows"


def keys_of(table: str) -> tuple[str, str]:
    """Names of a table's ids and rows in the checkpoint of a SavedModel, which escapes '.'."""
    of_table = f"served_tables/_tables/{table.replace('.', '..')}"
    return f"{of_table}/0/.ATTRIBUTES/VARIABLE_VALUE", f"{of_table}/1/.ATTRIBUTES/VARIABLE_VALUE"


def read_bundle(export: pathlib.Path) -> dict:
    """All tensors of the checkpoint of a SavedModel, by name."""
    bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
    return {name: bundle.get_tensor(name) for name in bundle.get_variable_to_shape_map()}


def write_bundle(export: pathlib.Path, tensors: dict) -> None:
    """Replaces the checkpoint of a SavedModel."""
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
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
