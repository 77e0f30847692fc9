"""The single import of TensorFlow and Keras: every module of this package imports `tf` and `keras` from here.

The package works with the Keras that TensorFlow has: Keras 3, or tf_keras where the environment has
TF_USE_LEGACY_KERAS=1, as a program of TFRA 0.8.1 needs it. The order of imports does not matter. What differs is in
keras_3.py and legacy.py, by the same names, so that other modules are written once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from tf_fusedrec._environment import KERAS_IS_LEGACY, KERAS_PACKAGE, OPS_REMEDY, check_versions

import tensorflow as tf  # isort: skip

keras: Any = importlib.import_module(KERAS_PACKAGE)
check_versions(tf.version.VERSION, keras.__version__)

from tensorflow.python.autograph.core import config as _autograph  # noqa: E402
from tensorflow.python.eager import record as _record  # noqa: E402
from tensorflow.python.ops import control_flow_util as _control_flow  # noqa: E402
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # noqa: E402  The format of tf.profiler's files.

if KERAS_IS_LEGACY:
    from tf_fusedrec._tf_compat import legacy as keras_api
else:
    from tf_fusedrec._tf_compat import keras_3 as keras_api  # type: ignore[no-redef]

# AutoGraph skips `keras`, but rewrites the sources of other packages at the first step of every process. That
# takes 15 s for `tf_keras` and for TFRA, and 3 s for the layers here. Their code does not need it. TensorFlow has no
# public list of modules to skip. Keras still converts a user's layers, and converted_as_here a user's functions. The
# reference models are written as a user's.
_LEFT_ALONE = ("tf_keras", "tensorflow_recommenders_addons", "tf_fusedrec")
_autograph.CONVERSION_RULES = (
    _autograph.Convert("tf_fusedrec.models"),
    *map(_autograph.DoNotConvert, _LEFT_ALONE),
    *_autograph.CONVERSION_RULES,
)


def converted_as_here(function: Callable) -> Callable:
    """Converts a user's function by AutoGraph if the calling code is converted. For calls from skipped modules."""
    return tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())


def unconverted(function: Callable) -> Callable:
    """The function without AutoGraph, whose conversion takes seconds. Keras still converts layers.

    Call it outside of any trace. tf.autograph.experimental.do_not_convert would keep Keras from converting.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=False)


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


def optimizers_in(optimizer: Any) -> list[Any]:
    """An optimizer, and those of a LossScaleOptimizer or of Keras 3's MultiOptimizer, which get its gradients."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(part for part in inner if part is not None)]


def of_other_keras(value: object) -> bool:
    """Whether a model, layer, optimizer, loss, metric or symbolic tensor is of the Keras that is not chosen here."""
    package = "keras" if KERAS_IS_LEGACY else "tf_keras"
    return any(base.__module__.split(".")[0] == package for base in type(value).__mro__)


__all__ = [
    "KERAS_IS_LEGACY",
    "OPS_REMEDY",
    "XSpace",
    "check_versions",
    "converted_as_here",
    "keras",
    "keras_api",
    "of_other_keras",
    "optimizers_in",
    "outside_clusters",
    "recorded_by_tape",
    "tf",
    "unconverted",
]
