"""The part of a delta that a running server reads, in files that operations of stock TensorFlow read and verify.

    server/header                         128 bytes: magic (8), base version (32), result version (32), layout (32),
                                          checksums of the files below (8 + 8), checksum of these 120 bytes (8)
    server/changes.index                  a tensor bundle:
    server/changes.data-00000-of-00001      weights/<i>: all dense weights, in the order of the model
                                            <g>/ids <int64>[n], <g>/tables <int64>[n]: entries of group g, changed
                                              rows first; a table is a position in the group (overlay.Group)
                                            <g>/rows <dtype>[k, D]: rows of the first k entries; the others are removed

Checksums are TensorFlow's fingerprints (FarmHash64), because a server's graph computes them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.saved_model.overlay import Group
from tf_fusedrec.saved_model.row_formats import decoded

VERSION_BYTES = 32
_MAGIC = b"fr.live\x01"
_FIELDS = (len(_MAGIC), VERSION_BYTES, VERSION_BYTES, VERSION_BYTES, 8, 8, 8)
_FILES = ("index", "data-00000-of-00001")
Changes = Mapping[str, Mapping[str, np.ndarray]]
Entries = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def write(
    delta: pathlib.Path,
    versions: Sequence[str],
    groups: Sequence[Group],
    changes: Changes,
    weights: Sequence[np.ndarray],
) -> None:
    """Writes `server/` of a delta.

    Args:
      delta: Folder of the delta.
      versions: Version of the base, version of the result, layout; 32 letters each.
      groups: All tables, by group.
      changes: By table, "ids" and "rows" <uint8>[k, bytes] of changed rows and "removed" ids.
      weights: All dense weights.
    """
    folder = delta / "server"
    folder.mkdir(parents=True)
    tensors = {f"weights/{at}": weight for at, weight in enumerate(weights)}
    for number, group in enumerate(groups):
        parts: dict[str, list[np.ndarray]] = {"ids": [], "tables": [], "rows": []}
        for kind in ("ids", "removed"):
            for table, name in enumerate(group.names):
                ids = changes[name][kind]
                parts["ids"].append(ids)
                parts["tables"].append(np.full(len(ids), table, np.int64))
        parts["rows"] = [changes[name]["rows"].view(group.dtype.as_numpy_dtype) for name in group.names]
        tensors.update({f"{number}/{part}": np.concatenate(arrays) for part, arrays in parts.items()})
    names = sorted(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "changes"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )
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


def read(
    delta: tf.Tensor, header: Header, groups: Sequence[Group], weights: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], list[Entries]]:
    """Reads and verifies the changes: dense weights, and per group the ids, tables, alive and rows of an Overlay."""
    prefix = tf.strings.join([delta, "/server/changes"])
    verified = []
    for name, wanted in zip(_FILES, (header.index, header.data)):
        path = tf.strings.join([prefix, f".{name}"])
        verified.append(_assert_checksum(path, tf.io.read_file(path), wanted))
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
    numbers = [*tensors[: len(weights)], *(decoded(of, group.columns - 4) for of, group in zip(rows, groups))]
    finite = [tf.reduce_all(tf.math.is_finite(part)) for part in numbers if part.dtype.is_floating]
    words = [
        "delta ",
        delta,
        " holds a weight or a row that is not finite. Remedy: the delta of an earlier checkpoint.",
    ]
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(finite), [tf.strings.join(words)])]):
        tensors = [tf.identity(tensor) for tensor in tensors]
    restored = [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, weights)]
    parts = tensors[len(weights) :]
    return restored, [_entries(group, *parts[3 * at : 3 * at + 3]) for at, group in enumerate(groups)]


def _entries(group: Group, ids: tf.Tensor, tables: tf.Tensor, rows: tf.Tensor) -> Entries:
    ids, tables, rows = (
        tf.ensure_shape(ids, [None]),
        tf.ensure_shape(tables, [None]),
        tf.ensure_shape(rows, [None, group.columns]),
    )
    entries, changed = tf.shape(ids)[0], tf.shape(rows)[0]
    return ids, tables, tf.range(entries) < changed, tf.pad(rows, [[0, entries - changed], [0, 0]])


def _checksum(text: tf.Tensor) -> tf.Tensor:
    """Checksum <uint8>[8] of a string."""
    return tf.raw_ops.Fingerprint(data=text[tf.newaxis], method="farmhash64")[0]


def _assert_checksum(path: tf.Tensor, text: tf.Tensor, wanted: tf.Tensor) -> tf.Operation:
    """Fails unless the checksum of a file's contents is `wanted` <string>[], 8 bytes."""
    same = tf.reduce_all(_checksum(text) == tf.io.decode_raw(wanted, tf.uint8))
    return tf.debugging.Assert(same, [tf.strings.join(["file ", path, " is damaged. Remedy: copy the delta again."])])
