"""JSON of TensorFlow Serving's predict API, as arrays and back.

Row form: {"instances": [{input: value}, ...]} -> {"predictions": [...]}, for inputs of one leading size.
Columnar form: {"inputs": {input: tensor}} -> {"outputs": ...}, for all inputs.

A lone input or output needs no name. Strings are texts, or {"b64": ...} for bytes. A name that the signature does not
have is refused here in both forms; TensorFlow Serving ignores it in the columnar form.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tf_fusedrec.models.serve.loaded import RequestError, Signature, Spec

if TYPE_CHECKING:
    from tf_fusedrec.models.serve.user_columns import UserColumns

DEFAULT_SIGNATURE = "serving_default"
COLUMNS = "columns"  # signature of requests in user columns


class Predict(NamedTuple):
    """A predict request."""

    signature: str
    inputs: dict[str, np.ndarray]
    in_rows: bool
    splits: np.ndarray | None = None  # <int64>[rows + 1] of a request in user columns: the outputs of each row


def parse(body: bytes, signatures: Mapping[str, Signature], columns: UserColumns | None = None) -> Predict:
    """Reads a predict request. `columns` are those of user_columns.py that the export takes, if any.

    Raises:
      RequestError: The body is no such request, or its inputs differ from its signature.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"JSON Parse error: {error}") from error
    if not isinstance(request, dict):
        raise RequestError(400, f"JSON Value: {_shown(request)} Is not object")
    name = request.get("signature_name") or DEFAULT_SIGNATURE
    if not isinstance(name, str):
        raise RequestError(400, f"'signature_name' key must be a string value, got {_shown(name)}")
    if columns is not None and name == COLUMNS:
        read = columns.read(request.get("instances"), signatures[columns.signature].inputs)
        return Predict(columns.signature, read.inputs, True, read.exposed_splits)
    if name not in signatures:
        raise RequestError(
            400,
            f'Serving signature name: "{name}" not found in signature def, which has '
            f"{sorted([*signatures, *([COLUMNS] if columns else [])])}",
        )
    if "instances" in request and "inputs" in request:
        raise RequestError(400, "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist")
    wanted = signatures[name].inputs
    if "instances" in request:
        return Predict(name, _arrays(_columns(request["instances"], wanted), wanted), True)
    if "inputs" in request:
        return Predict(name, _arrays(_named(request["inputs"], wanted), wanted), False)
    raise RequestError(400, "Missing 'inputs' or 'instances' key")


def response_by_row(outputs: Mapping[str, np.ndarray], splits: np.ndarray) -> bytes:
    """Returns the body of the answer to a request in user columns: of each row, its part of every output."""
    plain = {name: _plain(name, value) for name, value in sorted(outputs.items())}
    bounds = list(zip(splits[:-1].tolist(), splits[1:].tolist()))
    rows = [{name: values[begin:end] for name, values in plain.items()} for begin, end in bounds]
    return json.dumps({"predictions": rows}).encode()


def response(outputs: Mapping[str, np.ndarray], in_rows: bool) -> bytes:
    """Returns the body of an answer.

    Raises:
      RequestError: The request was in row form, and the outputs have no common leading size.
    """
    if in_rows:
        sizes = {name: value.shape[:1] for name, value in outputs.items()}
        if () in sizes.values() or len(set(sizes.values())) > 1:
            shapes = {name: list(value.shape) for name, value in outputs.items()}
            raise RequestError(
                400, f"outputs have inconsistent batch sizes: {shapes}. Send 'inputs', the columnar form"
            )
    plain = {name: _plain(name, value) for name, value in sorted(outputs.items())}
    if len(plain) == 1:
        (answer,) = plain.values()
    elif in_rows:
        answer = [dict(zip(plain, row)) for row in zip(*plain.values())]
    else:
        answer = plain
    return json.dumps({"predictions" if in_rows else "outputs": answer}).encode()


def _named(inputs: Any, wanted: Mapping[str, Spec]) -> dict[str, Any]:
    if isinstance(inputs, dict) and not _is_bytes(inputs):
        return inputs
    if len(wanted) != 1:
        raise RequestError(400, f"inputs is a plain value/list, but expecting an object with the keys {sorted(wanted)}")
    return dict.fromkeys(wanted, inputs)


def _columns(instances: Any, wanted: Mapping[str, Spec]) -> dict[str, list[Any]]:
    if not isinstance(instances, list) or not instances:
        raise RequestError(400, f"Expecting 'instances' to be a list with values, got {_shown(instances)}")
    rows = [_named(instance, wanted) for instance in instances]
    for number, row in enumerate(rows):
        if set(row) != set(rows[0]):
            raise RequestError(
                400,
                f"Failed to process element: {number} of 'instances' list. It has the keys {sorted(row)}, and the "
                f"first element has {sorted(rows[0])}",
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _arrays(values: Mapping[str, Any], wanted: Mapping[str, Spec]) -> dict[str, np.ndarray]:
    missing, unknown = sorted(set(wanted) - set(values)), sorted(set(values) - set(wanted))
    if missing or unknown:
        faults = [f"{names} are {what}" for names, what in ((missing, "missing"), (unknown, "unknown")) if names]
        raise RequestError(400, f"inputs {' and '.join(faults)}. The signature has {sorted(wanted)}.")
    return {name: _array(name, values[name], spec) for name, spec in wanted.items()}


def _array(name: str, value: Any, spec: Spec) -> np.ndarray:
    try:
        array = np.array(_texts(value), object) if spec.dtype.kind == "O" else np.array(value)
    except ValueError as error:
        raise RequestError(400, f"input {name!r} wants {spec}, got {_shown(value)}: {error}") from error
    if array.size == 0:
        array = array.astype(spec.dtype)
    if not _holds(array, spec.dtype):
        raise RequestError(400, f"input {name!r} wants {spec}, JSON Value: {_shown(value)} is not of expected type")
    if spec.shape is not None and (
        array.ndim != len(spec.shape) or any(want not in (None, got) for got, want in zip(array.shape, spec.shape))
    ):
        raise RequestError(400, f"input {name!r} wants {spec}, got shape {list(array.shape)}")
    return array.astype(spec.dtype)


def _holds(array: np.ndarray, dtype: np.dtype) -> bool:
    """Returns whether values as JSON gave them are of the dtype, in its range."""
    if dtype.kind == "O":
        return all(isinstance(text, bytes) for text in array.flat)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return array.size == 0 or (array.dtype.kind in "iu" and limits.min <= array.min() and array.max() <= limits.max)
    return array.dtype.kind in ("b" if dtype.kind == "b" else "iuf")


def _is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)


def _texts(value: Any) -> Any:
    """Returns nested lists with their texts as bytes. Other values stay."""
    if isinstance(value, list):
        return [_texts(one) for one in value]
    if _is_bytes(value):
        return base64.b64decode(value["b64"], validate=True)
    return value.encode() if isinstance(value, str) else value


def _plain(name: str, value: np.ndarray) -> Any:
    if value.dtype.kind == "O":
        return _strings(value.tolist(), name.endswith("_bytes"))
    if value.dtype == np.float32:
        return value.astype(str).astype(np.float64).tolist()  # the shortest decimals that give the number
    return value.astype(np.float32).tolist() if value.dtype.kind == "V" else value.tolist()  # V: bfloat16


def _strings(value: Any, as_bytes: bool) -> Any:
    if isinstance(value, list):
        return [_strings(one, as_bytes) for one in value]
    return {"b64": base64.b64encode(value).decode()} if as_bytes else value.decode(errors="backslashreplace")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
