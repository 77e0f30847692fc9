"""Loads an export and calls its signatures with NumPy arrays."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

DESCRIPTION = pathlib.PurePath("assets.extra/tables.json")
# The HTTP status of each error of TensorFlow, as TensorFlow Serving chooses it. 500 for the others.
STATUS_OF_CODE = {1: 499, 3: 400, 4: 504, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 11: 400, 12: 501, 14: 503}

_ALIGNED = 64  # bytes
_MOST_LETTERS = 1 << 16  # of the strings of an input; more take 24 bytes each on the way


class RequestError(Exception):
    """A request that gets an error.

    Args:
      status: HTTP status of the answer.
      message: Text for the client.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self))


class Spec(NamedTuple):
    """An input or output of a signature."""

    dtype: np.dtype  # object for strings
    shape: tuple[int | None, ...] | None  # None: of unknown rank

    def __str__(self) -> str:
        kind = "string" if self.dtype.kind == "O" else self.dtype.name
        sizes = "?" if self.shape is None else ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{kind} [{sizes}]"


class Signature(NamedTuple):
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]


class Export:
    """A loaded export.

    Args:
      path: Folder that fr.export wrote. A folder whose name is a number has this number as its version, others have 1.

    Raises:
      ValueError: The folder is no export, is damaged, or needs tf_fusedrec, which is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.version = int(self.path.resolve().name) if self.path.resolve().name.isdecimal() else 1
        self.ops = _ops_of(self.path)
        if self.ops == "ours":
            _import_ops(self.path)
        self._tf = importlib.import_module("tensorflow")
        self._letters = self._tf.constant([bytes([letter]) for letter in range(256)])
        try:
            self._loaded = self._tf.saved_model.load(str(self.path))
            self._definitions = _definitions_of(self.path)
        except Exception as error:  # TensorFlow and its readers raise a dozen kinds of errors for damaged files.
            raise ValueError(
                f"export {os.fspath(path)!r} cannot be loaded: {reason(str(error))}. Remedy: copy it again."
            ) from error
        self._check_finite()
        self.signatures = {name: self._signature(self._definitions[name]) for name in self._loaded.signatures}

    def _check_finite(self) -> None:
        """Raises ValueError for a weight or a row that is not finite, which exports of earlier versions may have."""
        tf = self._tf
        variables = list(getattr(self._loaded, "dense_weights", ()))
        if self.ops == "stock":  # Others have their rows in hash tables.
            tables = self._loaded.served_tables._tables
            groups = tables.values() if isinstance(tables, Mapping) else tables  # by name in format 2
            variables += [variable for group in groups for variable in group]
        for variable in variables:
            if variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
                raise ValueError(
                    f"export {os.fspath(self.path)!r} has numbers in {variable.name!r} that are not finite. Remedy: "
                    "the export of an earlier checkpoint."
                )

    def call(self, name: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs of a signature, by name. Strings are bytes in arrays of objects.

        Raises:
          RequestError: TensorFlow refuses the inputs, or fails.
        """
        tf = self._tf
        try:
            given = {key: self._tensor(value) for key, value in inputs.items()}
            outputs = self._loaded.signatures[name](**given)
            return {
                key: np.array(value.numpy(), object) if value.dtype == tf.string else np.asarray(value.numpy())
                for key, value in outputs.items()
            }
        except tf.errors.OpError as error:
            raise RequestError(STATUS_OF_CODE.get(error.error_code, 500), reason(error.message)) from error

    def described_version(self) -> tuple[str, int, int]:
        """Returns the digest of the current version, the number of applied deltas, and the number of changed rows."""
        told = self.call("version", {})
        return told["version"].item().decode(), int(told["deltas"]), int(told["changed_rows"])

    def metadata(self) -> dict[str, Any]:
        """Returns all signatures, in the form of TensorFlow Serving."""
        return {
            name: {
                "inputs": {key: _tensor_info(info) for key, info in definition.inputs.items()},
                "outputs": {key: _tensor_info(info) for key, info in definition.outputs.items()},
                "method_name": definition.method_name,
                "defaults": {},
            }
            for name, definition in self._definitions.items()
        }

    def _tensor(self, value: np.ndarray) -> Any:
        """The tensor of an array, by a way that leaks nothing: tf.constant of TensorFlow 2.16 leaks 0.3 KB a call."""
        tf = self._tf
        if value.dtype.kind == "O":
            texts = value.ravel().tolist()
            numbers = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
            if len(numbers) > _MOST_LETTERS:
                return tf.constant(value, tf.string)
            letters = tf.gather(self._letters, _shared(tf, np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)))
            joined = tf.strings.unsorted_segment_join(
                letters, _shared(tf, numbers), _shared(tf, np.array(len(texts), np.int64))
            )
            return tf.reshape(joined, _shared(tf, np.array(value.shape, np.int64)))
        return tf.constant(value) if value.dtype.kind == "V" else _shared(tf, value)

    def _signature(self, definition: Any) -> Signature:
        parts = definition.inputs, definition.outputs
        return Signature(*({name: self._spec(info) for name, info in part.items()} for part in parts))

    def _spec(self, info: Any) -> Spec:
        dtype = self._tf.as_dtype(info.dtype)
        sizes = tuple(None if dim.size < 0 else dim.size for dim in info.tensor_shape.dim)
        shape = None if info.tensor_shape.unknown_rank else sizes
        return Spec(np.dtype(object if dtype == self._tf.string else dtype.as_numpy_dtype), shape)


def _shared(tf: Any, value: np.ndarray) -> Any:
    """A tensor in memory of NumPy, at an address that TensorFlow takes. It ends the process at others."""
    memory = np.empty(value.nbytes + _ALIGNED, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED
    copied = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    copied[...] = value
    return tf.experimental.dlpack.from_dlpack(copied.__dlpack__())


def _ops_of(path: pathlib.Path) -> str:
    if (path / "delta.json").exists():
        raise ValueError(
            f"export {os.fspath(path)!r} is a delta. Remedy: pass the full export as --export, and the folder that "
            "holds the delta as --deltas."
        )
    missing = [name for name in ("saved_model.pb", str(DESCRIPTION)) if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"export {os.fspath(path)!r} has no {missing[0]}. Remedy: pass a folder that tf_fusedrec.export or "
            "`fusedrec export` wrote."
        )
    try:
        return json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))["ops"]
    except (ValueError, KeyError, TypeError) as error:
        named = os.fspath(path / DESCRIPTION)
        raise ValueError(f"file {named!r} is damaged: {error!r}. Remedy: copy it again.") from error


def _import_ops(path: pathlib.Path) -> None:
    try:
        importlib.import_module("tf_fusedrec")
    except ImportError as error:
        raise ValueError(
            f"export {os.fspath(path)!r} has ops 'ours', which need tf_fusedrec here: {error}. Remedy: install "
            "tf_fusedrec, or export with ops 'stock'."
        ) from error


def _definitions_of(path: pathlib.Path) -> dict[str, Any]:
    messages = importlib.import_module("tensorflow.core.protobuf.saved_model_pb2")
    saved = messages.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return dict(saved.meta_graphs[0].signature_def)


def _tensor_info(info: Any) -> dict[str, Any]:
    types = importlib.import_module("tensorflow.core.framework.types_pb2")
    shape = info.tensor_shape
    return {
        "dtype": types.DataType.Name(info.dtype),
        "tensor_shape": {
            "dim": [{"size": str(dim.size), "name": dim.name} for dim in shape.dim],
            "unknown_rank": shape.unknown_rank,
        },
        "name": info.name,
    }


def reason(message: str) -> str:
    """Returns the message of an error of TensorFlow without its places in the graph."""
    message = re.sub(r"\{\{(function_)?node [^}]*\}\} ?", "", message)
    message = re.sub(r"^assertion failed: \[(.*)\]$", r"\1", message, flags=re.MULTILINE)
    places = ("Graph execution error:", "Detected at node", "<stack traces", "\t [[")
    lines = [line for line in message.split("\n") if line and not line.startswith(places)]
    return "\n".join(lines).partition(" [Op:")[0]
