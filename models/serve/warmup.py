"""Replays the warm-up requests of an export before the first user comes, as TensorFlow Serving does.

The file holds TFRecords of tensorflow.serving.PredictionLog, which fr.saved_model.write_warmup_requests writes. The
fields that a predict request has there are declared here, so a server needs no package of TensorFlow Serving.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pathlib
import time
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from tf_fusedrec.models.serve.loaded import Export, RequestError

FILE = pathlib.PurePath("assets.extra/tf_serving_warmup_requests")
_LOGGER = logging.getLogger("tf_fusedrec.models.serve")
_REFUSED_THERE = "TensorFlow Serving would not load this export."


def replay(export: Export) -> int:
    """Sends the requests of the export's file, if it has one. Returns the number of answered ones.

    A record that is no predict request, or that the model does not answer, is named in the log and skipped. Behind a
    damaged place of the file no record can be read, so the rest is left out.
    """
    tf, file = importlib.import_module("tensorflow"), export.path / FILE
    if not file.is_file():
        return 0
    begun, answered, number = time.monotonic(), 0, 0
    try:
        for number, record in enumerate(tf.data.TFRecordDataset(str(file)).as_numpy_iterator(), 1):
            try:
                _send(export, record)
                answered += 1
            except (RequestError, ValueError) as error:
                _LOGGER.error(
                    "record %d of %s is skipped: %s. %s Remedy: write the requests again.",
                    number, file, error, _REFUSED_THERE,
                )  # fmt: skip
    except tf.errors.OpError as error:
        _LOGGER.error(
            "file %s is damaged behind record %d: %s. %s This server goes on without the rest of the requests. Remedy: "
            "copy the file again.",
            file, number, error.message, _REFUSED_THERE,
        )  # fmt: skip
    _LOGGER.info("answered %d warm-up requests in %.1f s", answered, time.monotonic() - begun)
    return answered


def _send(export: Export, record: bytes) -> None:
    make_ndarray = importlib.import_module("tensorflow").make_ndarray
    try:
        log = _prediction_log().FromString(record)
    except message.DecodeError as error:
        raise ValueError(f"it is no PredictionLog ({error})") from error
    if not log.HasField("predict_log"):
        raise ValueError("it is no predict request")
    request = log.predict_log.request
    name = request.model_spec.signature_name or "serving_default"
    if name not in export.signatures:
        raise ValueError(f"the export has no signature {name!r}, only {sorted(export.signatures)}")
    wanted = export.signatures[name].inputs
    if set(request.inputs) != set(wanted):
        raise ValueError(f"it has the inputs {sorted(request.inputs)}, but {name!r} wants {sorted(wanted)}")
    export.call(name, {key: make_ndarray(tensor) for key, tensor in request.inputs.items()})


@functools.cache
def _prediction_log() -> Any:
    """Returns the message class, with the numbers that the fields have in TensorFlow Serving."""
    package = "fusedrec.serve"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    file.dependency.append("tensorflow/core/framework/tensor.proto")
    # Field number and type: a message of this file, a TensorProto, or None for a string.
    fields: dict[str, dict[str, tuple[int, str | None]]] = {
        "ModelSpec": {"signature_name": (3, None)},
        "PredictRequest": {
            "model_spec": (1, f".{package}.ModelSpec"),
            "inputs": (2, f".{package}.PredictRequest.InputsEntry"),
        },
        "PredictLog": {"request": (1, f".{package}.PredictRequest")},
        "PredictionLog": {"predict_log": (6, f".{package}.PredictLog")},
    }

    def declare(made: descriptor_pb2.DescriptorProto, of_message: dict[str, tuple[int, str | None]]) -> None:
        types = descriptor_pb2.FieldDescriptorProto
        for name, (number, of) in of_message.items():
            kind = {"type": types.TYPE_STRING} if of is None else {"type": types.TYPE_MESSAGE, "type_name": of}
            many = types.LABEL_REPEATED if name == "inputs" else types.LABEL_OPTIONAL
            made.field.add(name=name, number=number, label=many, **kind)

    for name, of_message in fields.items():
        declare(file.message_type.add(name=name), of_message)
    # A map field is a repeated message with these two fields.
    entry = file.message_type[1].nested_type.add(name="InputsEntry")
    declare(entry, {"key": (1, None), "value": (2, ".tensorflow.TensorProto")})
    entry.options.map_entry = True
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.PredictionLog"))
