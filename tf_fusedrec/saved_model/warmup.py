"""Warm-up requests of a SavedModel: TensorFlow Serving sends them to a model before it answers its first user.

The first request of every input shape is slow, because TensorFlow then prepares the graph.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf

FILE = pathlib.Path("assets.extra/tf_serving_warmup_requests")
MOST_REQUESTS = 1000  # TensorFlow Serving refuses a model with more.


def write_warmup_requests(
    path: str | os.PathLike, requests: Sequence[Mapping[str, Any]], signature: str = "serving_default"
) -> None:
    """Adds warm-up requests to an export, after it has answered each of them. Needs the package tensorflow-serving-api.

    A delta does not hold them: after apply_delta on disk, write them again.

    Args:
      path: Folder of a full export, on this machine.
      requests: For each request, arrays by input of the signature. One per shape that users send is enough.
      signature: Name of the signature.

    Raises:
      ImportError: tensorflow-serving-api is not installed.
      ValueError: The export has no such signature or has warm-up requests; there is no request or too many; a request
        has other inputs, or the model fails to answer it: TensorFlow Serving would not load the model.

    Examples:
      >>> fr.saved_model.write_warmup_requests("base", [{"item": np.array([1, 2])}], signature="score")
    """
    try:
        prediction_log_pb2 = importlib.import_module("tensorflow_serving.apis.prediction_log_pb2")
    except ImportError as error:
        raise ImportError(
            "the module tensorflow_serving is missing, whose message types the file of warm-up requests has. Run "
            f"pip install --no-deps tensorflow-serving-api=={tf.__version__.rsplit('.', 1)[0]}.*"
        ) from error
    file = pathlib.Path(path) / FILE
    if file.exists():
        raise ValueError(f"{os.fspath(file)!r} exists. Remove it first.")
    if not 1 <= len(requests) <= MOST_REQUESTS:
        raise ValueError(f"got {len(requests)} requests, want 1 .. {MOST_REQUESTS}. Use one per shape of inputs.")
    signatures = tf.saved_model.load(os.fspath(path)).signatures
    if signature not in signatures:
        raise ValueError(f"export {os.fspath(path)!r} has no signature {signature!r}. Use one of {sorted(signatures)}.")
    specs = signatures[signature].structured_input_signature[1]
    records = []
    for number, request in enumerate(requests):
        if set(request) != set(specs):
            raise ValueError(
                f"request {number} has the inputs {sorted(request)}, but {signature!r} wants {sorted(specs)}. Use "
                "exactly these."
            )
        log = prediction_log_pb2.PredictionLog()
        log.predict_log.request.model_spec.signature_name = signature
        try:
            tensors = {name: tf.convert_to_tensor(value, specs[name].dtype) for name, value in request.items()}
            signatures[signature](**tensors)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise ValueError(
                f"{signature!r} does not answer request {number}, so TensorFlow Serving would not load the model: "
                f"{error}. Use a request that it answers."
            ) from error
        for name, tensor in tensors.items():
            log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(tensor))
        records.append(log.SerializeToString())
    partial = file.with_name(f"{file.name}.partial")
    with tf.io.TFRecordWriter(str(partial)) as writer:
        for record in records:
            writer.write(record)
    partial.rename(file)
