"""The server's side of delta exports: builds the next full export from a full export and a delta.

    python exports/1-to-2/apply_delta.py exports/1 exports/1-to-2 exports/2      # base, delta, output
    tf_fusedrec.apply_delta("exports/1", "exports/1-to-2", "exports/2")          # the same

A delta is not a SavedModel itself. It has a SavedModel with all dense weights and without rows, the changed rows, and
a copy of this file. This file therefore imports only TensorFlow and NumPy, and works with any version of Keras:

    delta.json                    {"format", "ops", "tables": {name: {"dim", "dtype"}}, "base" and "result": digests,
                                   "identity": of the base,
                                   "files": {path: [bytes, checksum]} of all other files}
    model/                        the next export, without rows of tables
    changes/<table>.ids.npy       <int64>[n], ascending: ids of new or changed rows
    changes/<table>.rows.npy      <uint8>[n, bytes of a row]
    changes/<table>.removed.npy   <int64>[m], ascending: ids of removed rows
    server/                       the same changes and the dense weights, for a running server (delta.py)
    apply_delta.py                this file

Rows are compared and copied as bytes, so the output equals the full export bit by bit. A digest covers all ids and rows
of a table. All files and the resulting rows are verified before the first byte is written.

An export with ops="ours" keeps its rows in assets/<table>.rows. The file has a header of 24 bytes [magic | rows
<uint64> | checksum] and records [id <int64> | row] by ascending id. The server's graph verifies it (native_tables.py).

An export with ops="stock" has three variables for each group of tables (groups_of), see joined(). In format 2 it has
the ids and rows of each table.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

FORMAT = {"stock": 3, "ours": 2}  # of exports that this version writes
_BY_TABLE = 2  # format of stock exports without groups
DESCRIPTION = pathlib.Path("assets.extra/tables.json")  # SavedModel reserves the folder assets.extra for its users.
HEADER_BYTES = 24
BLOCK_ROWS = 1 << 16  # records per step of a checksum
ID_BYTES = 8
SCALE_BYTES = 4  # of a row in int8
MOST_TABLES = 64  # tables of a group: bits of a mask
_DTYPES = ("float32", "float16", "bfloat16", "int8")
_MAGIC = b"fr.rows\x02"
_BUNDLE = pathlib.Path("variables/variables")
_COPY = "Copy it again."


def apply_delta(base: str | os.PathLike, delta: str | os.PathLike, output: str | os.PathLike) -> None:
    """Writes the full export of a delta and its base. Needs memory for all rows, and twice for the rows of one table.

    Args:
      base: Folder of the full export that the delta starts from.
      delta: Folder written by `export(..., base=...)`.
      output: Folder to write, which must not exist.

    Raises:
      ValueError: `output` exists; `delta` is not a delta or starts from another base; a file is damaged, missing or
        outside its folder.
      OSError: `output` cannot be written. All errors name the file, and `output` is removed.
    """
    base, delta, output = (pathlib.Path(path) for path in (base, delta, output))
    if os.path.lexists(output):
        raise ValueError(f"output {os.fspath(output)!r} exists. Use another folder, or remove it.")
    description, described = read_delta(delta), describe(base)
    if described != {name: description[name] for name in described}:
        raise ValueError(_wrong_base(base, delta, f"the base has {described}"))
    if identity(base) != description.get("identity", {}):
        raise ValueError(_wrong_base(base, delta, f"the base has {identity(base)}"))
    if describe(delta / "model") != described:
        raise ValueError(f"file {os.fspath(delta / 'model' / DESCRIPTION)!r} differs from delta.json. {_COPY}")
    tables = read_tables(base)
    for name, (ids, rows) in tables.items():
        if digest(ids, rows) != description["base"][name]:
            raise ValueError(_wrong_base(base, delta, f"the rows of table {name!r} differ"))
        changes = _read_changes(delta, name, rows.shape[1])
        _check_finite(delta / f"changes/{name}.rows.npy", _numbers(changes[1], description["tables"][name]["dtype"]))
        tables[name] = _merged(ids, rows, *changes)
        if digest(*tables[name]) != description["result"][name]:
            files = os.fspath(delta / "changes" / name) + ".*.npy"
            raise ValueError(f"{files} do not give the rows that {os.fspath(delta)!r} describes. {_COPY}")
    for name, weight in read_bundle(delta / "model").items():
        _check_finite(delta / "model" / f"{_BUNDLE}: {name}", np.asarray(weight))
    partial = output.with_name(f"{output.name}.{uuid.uuid4().hex}.partial")
    try:
        for path in description["files"]:
            if path.startswith("model/"):
                to = partial / pathlib.PurePosixPath(path).relative_to("model")
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(delta / path, to)
        put_tables(partial, tables)
        partial.rename(output)
    except (OSError, tf.errors.OpError) as error:
        raise OSError(
            f"output {os.fspath(output)!r} cannot be written and was removed: {error}. Make room or grant "
            "rights there, then apply the delta again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wrong_base(base: pathlib.Path, delta: pathlib.Path, why: str) -> str:
    return (
        f"delta {os.fspath(delta)!r} does not start from base {os.fspath(base)!r}: {why}. Use the base of that "
        "export, or a full export."
    )


def read_delta(delta: pathlib.Path) -> dict:
    """Reads delta.json and verifies that all its files exist inside the folder, undamaged."""
    path = delta / "delta.json"
    if not path.exists():
        raise ValueError(
            f"delta {os.fspath(delta)!r} holds no delta.json. Use a folder written by export(..., base=...)."
        )
    description = _read_description(path)
    with _named(path):
        files, tables = description["files"], set(description["tables"])
        if not all(set(description[digests]) == tables for digests in ("base", "result")):
            raise ValueError("its digests are for other tables")
        if not all(len(file) == 2 for file in files.values()):
            raise ValueError("its 'files' must have the values [bytes, checksum]")
    needed = {f"changes/{name}.{part}.npy" for name in tables for part in ("ids", "rows", "removed")}
    existing = {
        file.relative_to(delta).as_posix()
        for part in ("model", "changes", "server") for file in _files_below(delta / part)
    }  # fmt: skip
    for name in sorted({*existing, *needed} - set(files)):
        raise ValueError(f"file {os.fspath(delta / name)!r} is not named by delta.json. Remove it.")
    for name, (size, checksum) in files.items():
        file = inside(delta, name)
        if [file.stat().st_size, checksum_of(file)] != [size, checksum]:
            has = f"{file.stat().st_size} bytes, whose checksum is not that of the {size} bytes named by delta.json"
            raise ValueError(f"file {os.fspath(file)!r} is damaged: it has {has}. {_COPY}")
    return description


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of reading a file into ValueErrors that name the file."""
    try:
        yield
    except Exception as error:  # JSON, NumPy and TensorFlow raise a dozen kinds of errors for damaged bytes.
        why = error if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"file {os.fspath(path)!r} is damaged: {why}. {_COPY}") from error


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    return [pathlib.Path(root) / name for root, _, names in os.walk(folder) for name in names]


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Path of the file `name`, a relative path with '/'. Raises ValueError if it is missing or outside the folder."""
    path, top = folder / name, os.path.realpath(folder)
    is_relative = not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in name.split("/"))
    if not is_relative or os.path.commonpath([top, os.path.realpath(path)]) != top:
        raise ValueError(f"file {os.fspath(path)!r} lies outside {os.fspath(folder)!r}. Use files, not links.")
    if not path.is_file():
        raise ValueError(f"file {os.fspath(path)!r} is missing. {_COPY}")
    return path


def checksum_of(path: pathlib.Path) -> str:
    """blake2b checksum of all bytes of a file, 32 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            hashed.update(block)
    return hashed.hexdigest()


def check_table_name(name: str) -> None:
    """Raises ValueError unless a file can have the table's name: no separators, not '.' or '..'."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
        raise ValueError(
            f"table name {name!r} cannot name a file. Use a name without separators, other than '.' and '..'."
        )


def describe(export: pathlib.Path) -> dict:
    """Reads {"format", "ops", "tables": {name: {"dim", "dtype"}}} of a full export, and raises ValueError otherwise."""
    if (export / "delta.json").exists():
        raise ValueError(f"base {os.fspath(export)!r} is a delta. Use the full export that apply_delta builds.")
    if not (export / DESCRIPTION).exists():
        raise ValueError(f"base {os.fspath(export)!r} is not an export: it has no {DESCRIPTION}. Use a full export.")
    described = _read_description(inside(export, DESCRIPTION.as_posix()))
    return {name: described[name] for name in ("format", "ops", "tables")}


def identity(export: pathlib.Path) -> dict:
    """Reads {"version", "layout"} of a full export: digests that running servers compare. Early exports have none."""
    described = _read_description(inside(export, DESCRIPTION.as_posix()))
    return {name: described[name] for name in ("version", "layout") if name in described}


def _read_description(path: pathlib.Path) -> dict:
    with _named(path):
        described = json.loads(path.read_text(encoding="utf-8"))
        known = described["format"] in FORMAT.values()
        if known and described["ops"] not in FORMAT:
            raise ValueError(f"it has ops {described['ops']!r}, want 'stock' or 'ours'")
        for name, table in described["tables"].items() if known else ():
            check_table_name(name)
            if type(table["dim"]) is not int or table["dim"] < 1 or table["dtype"] not in _DTYPES:
                raise ValueError(f"table {name!r} is described as {table}")
    if not known:
        want = " or ".join(map(str, sorted(FORMAT.values())))
        raise ValueError(
            f"file {os.fspath(path)!r} has format {described['format']}, want {want}. Use a full export by this "
            "version."
        )
    return described


def digest(ids: np.ndarray, rows: np.ndarray) -> str:
    """Digest of all ids <int64>[n] and rows <uint8>[n, bytes] of a table."""
    hashed = hashlib.blake2b(np.ascontiguousarray(ids, "<i8").data, digest_size=16)
    hashed.update(np.ascontiguousarray(rows).data)
    return hashed.hexdigest()


def row_bytes(dim: int, dtype: str) -> int:
    return dim * tf.as_dtype(dtype).size + (SCALE_BYTES if dtype == "int8" else 0)


def bytes_of(rows: np.ndarray) -> np.ndarray:
    """Rows [n, D] as <uint8>[n, bytes]."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.shape[1] * rows.dtype.itemsize)


def groups_of(tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Groups the tables {name: {"dim", "dtype"}} of an export: equal dim and dtype, at most MOST_TABLES in a group."""
    by_form: dict[tuple[int, str], list[str]] = {}
    for name, table in tables.items():
        by_form.setdefault((table["dim"], table["dtype"]), []).append(name)
    return [
        tuple(names[at : at + MOST_TABLES]) for names in by_form.values() for at in range(0, len(names), MOST_TABLES)
    ]


def joined(tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins tables of a group, each with ids <int64>[n], ascending, and rows [n, C], into m entries, by (id, table).

    Returns ids <int64>[m+1], the last the largest int64; masks <unsigned>[m+1], at the first entry of an id bit t if
    table t has the id, 0 elsewhere; rows [m+1, C], the last zeros.
    """
    count = sum(len(ids) for ids, _ in tables)
    mask = next(np.dtype(bits) for bits in ("u1", "u2", "u4", "u8") if len(tables) <= 8 * np.dtype(bits).itemsize)
    ids = np.concatenate([*(ids for ids, _ in tables), [np.iinfo(np.int64).max]]).astype(np.int64)
    order = np.argsort(ids[:-1], kind="stable")
    ids[:-1] = ids[order]
    table_bits = np.left_shift(np.ones(len(tables), mask), np.arange(len(tables), dtype=mask))
    bits = np.repeat(table_bits, [len(table_ids) for table_ids, _ in tables])[order]
    first = np.flatnonzero(np.concatenate([[True], ids[1:-1] != ids[:-2]])[:count])
    masks = np.zeros(count + 1, mask)
    if count:
        masks[first] = np.bitwise_or.reduceat(bits, first)
    places = np.empty(count, np.int64)
    places[order] = np.arange(count)
    rows = np.zeros([count + 1, tables[0][1].shape[1]], tables[0][1].dtype)
    begin = 0
    for _, table_rows in tables:  # one table at a time, because a second copy of all rows may not fit in memory
        rows[places[begin : begin + len(table_rows)]] = table_rows
        begin += len(table_rows)
    return ids, masks, rows


def separated(
    ids: np.ndarray, masks: np.ndarray, rows: np.ndarray, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The inverse of joined: yields ids and rows of each of `count` tables."""
    at = np.flatnonzero(masks)
    masks = masks[at]
    for table in range(count):
        has = (masks >> masks.dtype.type(table) & masks.dtype.type(1)).astype(bool)
        yield ids[at[has]], rows[at[has]]
        at[has] += 1  # An id's entries are neighbours, in the order of the tables.


def read_tables(export: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads ids <int64>[n], ascending, and rows <uint8>[n, bytes] of every table of a full export.

    Raises ValueError, which names the file, if a file is damaged, missing, or outside the folder.
    """
    described = describe(export)
    if described["ops"] == "ours":
        return {
            name: _read_records(inside(export, record_file(name)), name, row_bytes(**table))
            for name, table in described["tables"].items()
        }
    for part in _files_below(export / _BUNDLE.parent):
        inside(export, part.relative_to(export).as_posix())
    tables: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with _named(export / _BUNDLE):  # TensorFlow verifies a checksum of each tensor.
        bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
        for names, keys in _stored(described):
            # The last entry is the default row.
            ids, *masks, rows = (bundle.get_tensor(key)[:-1] for key in keys)
            each = separated(ids, masks[0], bytes_of(rows), len(names)) if masks else [(ids, bytes_of(rows))]
            tables.update(zip(names, each))
    return {name: tables[name] for name in described["tables"]}


def _read_changes(delta: pathlib.Path, table: str, row_bytes: int) -> list[np.ndarray]:
    """Reads a table's changes: changed ids, their rows, removed ids."""
    arrays: list[np.ndarray] = []
    for part, dtype, shape in (("ids", np.int64, ()), ("rows", np.uint8, (row_bytes,)), ("removed", np.int64, ())):
        path = inside(delta, f"changes/{table}.{part}.npy")
        with _named(path):
            array = np.load(path)
            if array.dtype != dtype or array.shape[1:] != shape or (part == "rows" and len(array) != len(arrays[0])):
                raise ValueError(f"it has {array.dtype} of shape {array.shape}")
        arrays.append(array)
    return arrays


def _numbers(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The floating numbers in rows <uint8>[n, bytes]; the scales of int8."""
    if dtype == "int8":
        return rows[:, -SCALE_BYTES:].copy().view("<f4")
    return rows.view(tf.as_dtype(dtype).as_numpy_dtype)


def _check_finite(name: pathlib.Path, numbers: np.ndarray) -> None:
    if numbers.dtype.kind in "fcV" and not np.isfinite(numbers).all():
        raise ValueError(
            f"{os.fspath(name)!r} holds numbers that are not finite. Use the delta of an earlier checkpoint."
        )


def _merged(
    ids: np.ndarray, rows: np.ndarray, changed: np.ndarray, changed_rows: np.ndarray, removed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    kept = ~np.isin(ids, np.concatenate([changed, removed]))
    ids = np.concatenate([ids[kept], changed])
    order = np.argsort(ids)
    return ids[order], np.concatenate([rows[kept], changed_rows])[order]


def put_tables(export: pathlib.Path, tables: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes tables, in the form of read_tables, into an export without tables."""
    described = describe(export)
    if described["ops"] == "ours":
        (export / "assets").mkdir(exist_ok=True)
        for name, (ids, rows) in tables.items():
            write_records(export / record_file(name), name, ids, rows)
        return
    tensors = read_bundle(export)
    for names, keys in _stored(described):
        ids, masks, rows = joined([tables[name] for name in names])
        values = ids, masks, rows.view(tf.as_dtype(described["tables"][names[0]]["dtype"]).as_numpy_dtype)
        tensors.update(zip(keys, values if len(keys) == len(values) else values[::2]))
    write_bundle(export, tensors)


# Files of rows. The checksum uses TensorFlow's fingerprint, because a server's graph computes it too.


def first_checksum(table: str, row_bytes: int) -> tf.Tensor:
    """Checksum <uint8>[8] of a table before its first record."""
    return _fingerprint(tf.constant([list(f"{table}/{row_bytes}".encode())], tf.uint8))[0]


def next_checksum(checksum: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    """Checksum <uint8>[8] after one more block of records <uint8>[n, bytes]. Only the last n may be < BLOCK_ROWS."""
    return _fingerprint(tf.concat([checksum, tf.reshape(_fingerprint(records), [-1])], axis=0)[tf.newaxis])[0]


def header_of(rows: tf.Tensor, checksum: tf.Tensor) -> tf.Tensor:
    """Header <uint8>[HEADER_BYTES] of a file with `rows` <int64>[] records."""
    return tf.concat([tf.constant(list(_MAGIC), tf.uint8), tf.bitcast(rows, tf.uint8), checksum], axis=0)


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
            raise ValueError(f"the checksum of its {len(records)} rows differs from its header")
    return np.ascontiguousarray(records[:, :ID_BYTES]).view("<i8")[:, 0], records[:, ID_BYTES:]


def record_file(table: str) -> str:
    return f"assets/{table}.rows"


def _stored(described: Mapping[str, Any]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Tables of a stock export that are stored together, with the names of their tensors in the checkpoint."""
    folder, tables = "served_tables/_tables", described["tables"]
    if described["format"] == _BY_TABLE:  # The checkpoint of a SavedModel escapes '.'.
        return [((name,), _keys(f"{folder}/{name.replace('.', '..')}", 2)) for name in tables]
    return [(names, _keys(f"{folder}/{number}", 3)) for number, names in enumerate(groups_of(tables))]


def _keys(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{at}/.ATTRIBUTES/VARIABLE_VALUE" for at in range(count)]


def keys_of(described: Mapping[str, Any]) -> set[str]:
    """Names of all ids and rows in the checkpoint of a stock export."""
    return {key for _, keys in _stored(described) for key in keys}


def read_bundle(export: pathlib.Path) -> dict:
    """All tensors of the checkpoint of a SavedModel, by name."""
    bundle = tf.train.load_checkpoint(str(export / _BUNDLE))
    return {name: bundle.get_tensor(name) for name in bundle.get_variable_to_shape_map()}


def write_bundle(export: pathlib.Path, tensors: dict) -> None:
    """Replaces the checkpoint of a SavedModel."""
    shutil.rmtree(export / _BUNDLE.parent)
    (export / _BUNDLE.parent).mkdir()
    save_tensors(export / _BUNDLE, tensors)


def save_tensors(prefix: pathlib.Path, tensors: dict) -> None:
    """Writes a checkpoint of tensors by name."""
    names = sorted(tensors)
    values = [tf.constant(tensors[name]) for name in names]
    tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} BASE DELTA OUTPUT")
    try:
        apply_delta(*sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
