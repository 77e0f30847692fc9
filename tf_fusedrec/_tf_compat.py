"""The single import of TensorFlow and Keras: every module of this package imports `tf` and `keras` from here.

TFRA 0.8.1 works with legacy Keras (the `tf_keras` package) only. TensorFlow chooses the Keras of `tf.keras` once,
when it is imported. This module therefore selects legacy Keras before it imports TensorFlow. It refuses a late
import, because a layer would fail later for no visible reason.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import random
import re
import runpy
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036  Messages for a Python that pip would not have chosen.
    raise ImportError(
        f"tf_fusedrec needs Python 3.10 to 3.13, but this is Python {'.'.join(map(str, sys.version_info[:3]))}. "
        "Remedy: make an environment with a newer Python, and install the wheel for it there."
    )

_SWITCH = "TF_USE_LEGACY_KERAS"
_ON = ("1", "true", "True")


def _choose_legacy_keras() -> None:
    chosen = os.environ.get(_SWITCH)
    if "tensorflow" in sys.modules and chosen not in _ON:
        raise ImportError(
            "tf_fusedrec needs legacy Keras (tf_keras), but TensorFlow was imported before it with Keras 3. "
            f"Remedy: import tf_fusedrec before tensorflow, or set {_SWITCH}=1 in the environment."
        )
    if chosen is not None and chosen not in _ON:
        raise ImportError(
            f"tf_fusedrec needs legacy Keras (tf_keras), but the environment has {_SWITCH}={chosen}. "
            f"Remedy: unset {_SWITCH} or set it to 1."
        )
    os.environ[_SWITCH] = "1"


_choose_legacy_keras()

OPS_REMEDY = (
    "Remedy: install the wheel for this TensorFlow, or in the clone, with this TensorFlow installed: "
    "pip install -e . --no-build-isolation."
)
_NEEDED = "tf_fusedrec needs legacy Keras (tf_keras) with the number of TensorFlow"


def check_versions(tensorflow: str | None, legacy_keras: str | None) -> None:
    """Checks that the ops here and tf_keras are made for this TensorFlow.

    Args:
      tensorflow, legacy_keras: Their versions; None where unknown.

    Raises:
      ImportError: They are for others.
    """
    if tensorflow and legacy_keras and tensorflow.split(".")[:2] != legacy_keras.split(".")[:2]:
        raise ImportError(
            f"{_NEEDED}, but tf_keras {legacy_keras} is installed beside TensorFlow {tensorflow}. "
            f"Remedy: pip install 'tf-keras=={tensorflow.rpartition('.')[0]}.*'."
        )
    record = pathlib.Path(__file__).with_name("ops") / "_build_info.py"  # setup.py writes it with the ops
    built = runpy.run_path(str(record)).get("TENSORFLOW_VERSION") if record.exists() else None
    if tensorflow and built and built != tensorflow:
        raise ImportError(
            f"The custom ops were built for TensorFlow {built}, but TensorFlow {tensorflow} is installed; "
            f"custom ops are bound to the exact version. {OPS_REMEDY}"
        )


def _installed(name: str) -> str | None:
    """The version of an installed release; None where its name is another one, such as tensorflow-cpu."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if re.fullmatch(r"[\d.]+", version) else None


# TensorFlow takes seconds to load, so a mismatch is looked for in the records of pip first.
check_versions(_installed("tensorflow"), _installed("tf-keras"))
try:
    if importlib.util.find_spec("tf_keras") is None:
        raise ModuleNotFoundError("No module named 'tf_keras'", name="tf_keras")
    import tensorflow as tf
    import tf_keras as keras
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("tf_keras"):
        raise
    raise ImportError(f"{_NEEDED}, but none is installed. Remedy: pip install 'tf-keras==2.16.*' for 2.16.") from error
check_versions(tf.version.VERSION, keras.__version__)

from tensorflow.python.autograph.core import config as _autograph  # noqa: E402
from tensorflow.python.eager import record as _record  # noqa: E402
from tensorflow.python.ops import control_flow_util as _control_flow  # noqa: E402
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # noqa: E402  The format of tf.profiler's files.

# AutoGraph skips `keras`, but rewrites the sources of other packages at the first step of every process. That
# takes 15 s for `tf_keras` and for TFRA, and 3 s for the layers here. Their code does not need it. TensorFlow has no
# public list of modules to skip. Keras still converts a user's layers, and converted_as_here a user's functions.
_LEFT_ALONE = ("tf_keras", "tensorflow_recommenders_addons", "tf_fusedrec")
_autograph.CONVERSION_RULES = (*map(_autograph.DoNotConvert, _LEFT_ALONE), *_autograph.CONVERSION_RULES)


def _create_seed(self: Any, given: int | None) -> int:
    """Draws a layer's seed from the generator of keras.utils.set_random_seed, or from Python's own."""
    if given is not None:
        return given
    return (getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random).randint(1, 10**9)


if tuple(map(int, keras.__version__.split(".")[:2])) < (2, 19):
    # These releases draw an integer up to the float 1e9, which Python 3.12 refuses: no layer after set_random_seed.
    keras.src.backend.RandomGenerator._create_seed = _create_seed


def converted_as_here(function: Callable) -> Callable:
    """Converts a user's function by AutoGraph if the calling code is converted. For calls from skipped modules."""
    return tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())


def unconverted(function: Callable) -> Callable:
    """The function without AutoGraph, whose conversion takes seconds. Keras still converts layers.

    Call it outside of any trace. tf.autograph.experimental.do_not_convert would keep Keras from converting.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=False)


_normalize_weights = keras.layers.SpectralNormalization.normalize_weights


def _converted_normalize_weights(self: Any) -> None:
    """Branches on a tensor, as no other layer, optimizer, loss or metric of tf_keras does."""
    autograph = tf.__internal__.autograph
    autograph.tf_convert(_normalize_weights, autograph.control_status_ctx(), user_requested=True)(self)


keras.layers.SpectralNormalization.normalize_weights = _converted_normalize_weights


# Custom ops and TFRA's tables have no XLA kernels, and the ids decide their sizes. A cluster of TensorFlow's
# auto-clustering (TF_XLA_FLAGS=--tf_xla_auto_jit=2) needs sizes that are known when it is compiled.
_OUTSIDE = "_XlaCompile"  # the attribute of an operation that tf.xla.experimental.jit_scope sets


def outside_clusters(what: str) -> contextlib.AbstractContextManager:
    """Keeps the operations made inside out of XLA, and all operations of the graph on variables that change shape.

    Args:
      what: Caller for the error message, such as "layer 'name'".

    Raises:
      ValueError: XLA compiles the whole function that is being traced.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    graph = tf.compat.v1.get_default_graph()
    if _control_flow.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            f"{what} is called inside a function with jit_compile=True, and its lookups have no XLA kernels. Use "
            "model.compile(..., jit_compile=False); dense blocks may be compiled by "
            "tf.function(block, jit_compile=True)."
        )
    graph._attr_scope_map.setdefault(_OUTSIDE, lambda node: _keeps_out(graph, node))
    return tf.xla.experimental.jit_scope(compile_ops=False)


def _keeps_out(graph: Any, node: Any) -> tf.compat.v1.AttrValue | None:
    """Returns the attribute for operations on variables of unknown shape, such as the rows of a step, else None."""
    if "Variable" not in node.op and not node.op.startswith("Resource"):
        return None
    for name in node.input:
        if name.startswith("^"):
            continue
        handle, _, output = name.partition(":")
        tensor = graph.get_operation_by_name(handle).outputs[int(output or 0)]
        if tensor.dtype == tf.resource and not _keeps_its_shape(tensor):
            return tf.compat.v1.AttrValue(b=False)
    return None


def _keeps_its_shape(handle: tf.Tensor) -> bool:
    data = getattr(handle, "_handle_data", None)
    shapes = [tf.TensorShape(entry.shape) for entry in data.shape_and_type] if data is not None else []
    return all(shape.is_fully_defined() for shape in shapes)


def recorded_by_tape(tensor: tf.Tensor) -> bool | None:
    """Whether an active gradient tape records what becomes of a tensor; None where no tape is active."""
    return _record.should_record_backprop([tensor]) if _record.could_possibly_record() else None


KERAS_3 = (
    "comes from Keras 3. Use its counterpart in tf_fusedrec.keras. What works beside Keras 3 is in docs/install.md."
)


def of_keras_3(value: object) -> bool:
    """Whether a model, layer, optimizer, loss, metric or symbolic tensor is one of Keras 3."""
    return any(kind.__module__.split(".")[0] == "keras" for kind in type(value).__mro__)


def keras_3_caller() -> Any:
    """The layer or model of Keras 3 that calls; None outside. It does not see the weights of a legacy layer."""
    state = sys.modules.get("keras.src.backend.common.global_state")  # Keras 3 has no public name for its running call
    context = None if state is None else state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


__all__ = [
    "KERAS_3",
    "OPS_REMEDY",
    "XSpace",
    "check_versions",
    "converted_as_here",
    "keras",
    "keras_3_caller",
    "of_keras_3",
    "outside_clusters",
    "recorded_by_tape",
    "tf",
    "unconverted",
]
