"""The trainer's side of delta exports: writes the changes from a base to a full export. applying.py is the server's.

The rows themselves are compared. Change counters would be cheaper, but a restarted job resets them to its last
checkpoint, and they would miss rows that were trained differently since.

A running server reads a part of the delta, in files that operations of stock TensorFlow read and verify:

    server/header                         128 bytes: magic (8), base version (32), result version (32), layout (32),
                                          checksums of the files below (8 + 8), checksum of these 120 bytes (8)
    server/changes.index                  a tensor bundle:
    server/changes.data-00000-of-00001      weights/<i>: all dense weights, in the order of the model
                                            <g>/ids <int64>[n], <g>/tables <int64>[n]: entries of group g, changed
                                              rows first; a table is a position in the group (served_rows.Group)
                                            <g>/rows <dtype>[k, D]: rows of the first k entries; the rest is removed

Checksums are TensorFlow's fingerprints (FarmHash64), because a server's graph computes them.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.served_rows import Group, decoded, groups_of

VERSION_BYTES = 32
_MAGIC = b"fr.live\x01"
_FIELDS = (len(_MAGIC), VERSION_BYTES, VERSION_BYTES, VERSION_BYTES, 8, 8, 8)
_FILES = ("index", "data-00000-of-00001")


def check_base(base: pathlib.Path, described: dict) -> None:
    """Raises ValueError unless `base` is a full export with these ops and tables; see applying.describe."""
    of_base = applying.describe(base)
    if of_base != described:
        raise ValueError(
            f"base {os.fspath(base)!r} has {of_base}, but the model to export has {described}. Use a base with the "
            "same format, ops, tables and rows, or a full export."
        )


def write_delta(base: pathlib.Path, export: pathlib.Path, delta: pathlib.Path, weights: Sequence[np.ndarray]) -> None:
    """Writes the changes from `base` to `export` into the new folder `delta`. The files of `export` move there.

    Both are full exports with the same ops and tables. `weights` are all dense weights of `export`.

    Raises:
      ValueError: their layouts differ.
    """
    description = {**applying.describe(export), "base": {}, "result": {}, "files": {}}
    of_base, of_result = applying.identity(base), applying.identity(export)
    if of_base.get("layout", of_result["layout"]) != of_result["layout"]:
        raise ValueError(
            f"base {os.fspath(base)!r} differs from the model in signatures, in shapes of dense weights, in assets, "
            "such as the columns of requests, or in constants, such as a catalog, its texts or statistics of numbers, "
            "so a running server could not take the delta. Write a full export, without base."
        )
    changes = {}
    before, after = applying.read_tables(base), applying.read_tables(export)
    (delta / "changes").mkdir(parents=True)
    for name in after:
        description["base"][name] = applying.digest(*before[name])
        description["result"][name] = applying.digest(*after[name])
        changes[name] = _changes(*before[name], *after[name])
        for part, array in changes[name].items():
            np.save(delta / "changes" / f"{name}.{part}.npy", array)
    # An export without a version cannot take deltas while it is served.
    versions = [of_base.get("version", "-" * VERSION_BYTES), of_result["version"], of_result["layout"]]
    description["identity"] = of_base
    write_server_changes(delta / "server", versions, groups_of(description["tables"]), changes, weights)
    if description["ops"] == "ours":
        for name in description["tables"]:
            (export / applying.record_file(name)).unlink()
    else:
        keys = applying.keys_of(description)
        kept = {name: value for name, value in applying.read_bundle(export).items() if name not in keys}
        applying.write_bundle(export, kept)
    export.rename(delta / "model")
    shutil.copyfile(applying.__file__, delta / "apply_delta.py")
    for path in sorted(path for path in delta.rglob("*") if path.is_file()):
        description["files"][path.relative_to(delta).as_posix()] = [path.stat().st_size, applying.checksum_of(path)]
    (delta / "delta.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


def _changes(old_ids: np.ndarray, old_rows: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    """New or changed ids <int64>[n] with their rows <uint8>[n, bytes], and removed ids <int64>[m]. All ids ascend."""
    same = np.isin(ids, old_ids)
    same[same] = (rows[same] == old_rows[np.searchsorted(old_ids, ids[same])]).all(axis=1)
    return {"ids": ids[~same], "rows": rows[~same], "removed": old_ids[~np.isin(old_ids, ids)]}


def write_server_changes(
    folder: pathlib.Path,
    versions: Sequence[str],
    groups: Sequence[Group],
    changes: Mapping[str, Mapping[str, np.ndarray]],
    weights: Sequence[np.ndarray],
) -> None:
    """Writes the folder `server` of a delta.

    `versions` are the versions of the base and of the result, and the layout, 32 letters each. `changes` have "ids",
    "rows" and "removed", by table.
    """
    folder.mkdir(parents=True)
    tensors = {f"weights/{at}": weight for at, weight in enumerate(weights)}
    for number, group in enumerate(groups):
        entries = [
            (changes[name][part], table) for part in ("ids", "removed") for table, name in enumerate(group.names)
        ]
        rows = [changes[name]["rows"].view(group.dtype.as_numpy_dtype) for name in group.names]
        tensors[f"{number}/ids"] = np.concatenate([ids for ids, _ in entries])
        tensors[f"{number}/tables"] = np.concatenate([np.full(len(ids), table, np.int64) for ids, table in entries])
        tensors[f"{number}/rows"] = np.concatenate(rows)
    applying.save_tensors(folder / "changes", tensors)
    sums = [_checksum(tf.io.read_file(str(folder / f"changes.{name}"))).numpy().tobytes() for name in _FILES]
    header = b"".join([_MAGIC, *(version.encode() for version in versions), *sums])
    (folder / "header").write_bytes(header + _checksum(tf.constant(header)).numpy().tobytes())


class Header(NamedTuple):
    """Description of a delta for servers, all <string>[]."""

    base: tf.Tensor
    result: tf.Tensor
    layout: tf.Tensor
    index: tf.Tensor
    data: tf.Tensor


class Entries(NamedTuple):
    """Changed and removed rows of one group, n entries; see served_rows.Overlay."""

    ids: tf.Tensor  # <int64>[n]
    tables: tf.Tensor  # <int64>[n]
    alive: tf.Tensor  # <bool>[n]
    rows: tf.Tensor  # <dtype>[n, D]


def read_header(delta: tf.Tensor) -> Header:
    """Reads and verifies the header in the folder `delta` <string>[]."""
    path = tf.strings.join([delta, "/server/header"])
    text = tf.io.read_file(path)
    size = sum(_FIELDS)
    # A field of a truncated file would be out of range. The checksum refuses the zeros.
    text = tf.strings.substr(tf.strings.join([text, "\0" * size]), 0, tf.maximum(tf.strings.length(text), size))
    fields = [tf.strings.substr(text, sum(_FIELDS[:at]), length) for at, length in enumerate(_FIELDS)]
    signed = tf.strings.join([tf.strings.substr(text, 0, size - 8), tf.strings.substr(text, size, -1)])
    with tf.control_dependencies([_assert_checksum(path, signed, fields[-1])]):
        return Header(*(tf.identity(field) for field in fields[1:-1]))


def read_server_changes(
    delta: tf.Tensor, header: Header, groups: Sequence[Group], weights: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], list[Entries]]:
    """Reads and verifies the changes: dense weights, and the entries of each group."""
    prefix = tf.strings.join([delta, "/server/changes"])
    verified = []
    for name, checksum in zip(_FILES, (header.index, header.data)):
        path = tf.strings.join([prefix, f".{name}"])
        verified.append(_assert_checksum(path, tf.io.read_file(path), checksum))
    names = [f"weights/{at}" for at in range(len(weights))]
    dtypes = [spec.dtype for spec in weights]
    for number, group in enumerate(groups):
        names += [f"{number}/ids", f"{number}/tables", f"{number}/rows"]
        dtypes += [tf.int64, tf.int64, group.dtype]
    if not names:
        return [], []
    with tf.control_dependencies(verified):
        tensors = tf.raw_ops.RestoreV2(
            prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
        )
    rows = [tf.ensure_shape(of, [None, group.columns]) for of, group in zip(tensors[len(weights) + 2 :: 3], groups)]
    numbers = [*tensors[: len(weights)], *map(decoded, rows)]
    finite = [tf.reduce_all(tf.math.is_finite(part)) for part in numbers if part.dtype.is_floating]
    words = ["delta ", delta]
    words.append(" holds a weight or a row that is not finite. Use the delta of an earlier checkpoint.")
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(finite), [tf.strings.join(words)])]):
        tensors = [tf.identity(tensor) for tensor in tensors]
    restored = [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, weights)]
    parts = tensors[len(weights) :]
    return restored, [_entries(group, *parts[3 * at : 3 * at + 3]) for at, group in enumerate(groups)]


def _entries(group: Group, ids: tf.Tensor, tables: tf.Tensor, rows: tf.Tensor) -> Entries:
    ids, tables = tf.ensure_shape(ids, [None]), tf.ensure_shape(tables, [None])
    rows = tf.ensure_shape(rows, [None, group.columns])
    entries, changed = tf.shape(ids)[0], tf.shape(rows)[0]
    return Entries(ids, tables, tf.range(entries) < changed, tf.pad(rows, [[0, entries - changed], [0, 0]]))


def _checksum(text: tf.Tensor) -> tf.Tensor:
    """Checksum <uint8>[8] of a string."""
    return tf.raw_ops.Fingerprint(data=text[tf.newaxis], method="farmhash64")[0]


def _assert_checksum(path: tf.Tensor, text: tf.Tensor, checksum: tf.Tensor) -> tf.Operation:
    """Fails unless the checksum of a file's contents is `checksum` <string>[], 8 bytes."""
    same = tf.reduce_all(_checksum(text) == tf.io.decode_raw(checksum, tf.uint8))
    return tf.debugging.Assert(same, [tf.strings.join(["file ", path, " is damaged. Copy the delta again."])])
