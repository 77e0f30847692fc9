"""The one door to TensorFlow and Keras: every module of this package imports `tf` and `keras` from here.

TFRA 0.8.1 works with legacy Keras (the `tf_keras` package) only, and TensorFlow decides once, when it is
imported, which Keras `tf.keras` is. So the switch is set here, before TensorFlow is imported, and an import
that comes too late is refused instead of failing later in a layer nobody would suspect.
"""

import os
import sys
from collections.abc import Callable

_SWITCH = "TF_USE_LEGACY_KERAS"
_ON = ("1", "true", "True")


def _choose_legacy_keras() -> None:
    chosen = os.environ.get(_SWITCH)
    if "tensorflow" in sys.modules and chosen not in _ON:
        raise ImportError(
            "tf_fusedrec needs legacy Keras (tf_keras 2.16), but TensorFlow was imported first with Keras 3. "
            f"Remedy: import tf_fusedrec before tensorflow, or set {_SWITCH}=1 in the environment."
        )
    if chosen is not None and chosen not in _ON:
        raise ImportError(
            f"tf_fusedrec needs legacy Keras (tf_keras 2.16), but the environment says {_SWITCH}={chosen}. "
            f"Remedy: unset {_SWITCH} or set it to 1."
        )
    os.environ[_SWITCH] = "1"


_choose_legacy_keras()

import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402
from tensorflow.python.autograph.core import config as _autograph  # noqa: E402
from tensorflow.python.ops import control_flow_util as _control_flow  # noqa: E402
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # noqa: E402  What tf.profiler writes.

# AutoGraph leaves `keras` alone, but rewrites the sources of `tf_keras` and of TFRA at the first step of every process:
# 15 s each on two cores, and nothing in them needs it. The list of modules that it leaves alone has no public name.
# What these call of a user's is converted as before, and so is what tf_fusedrec.tfra calls.
_LEFT_ALONE = ("tf_keras", "tensorflow_recommenders_addons", "tf_fusedrec.tfra")
_autograph.CONVERSION_RULES = (*map(_autograph.DoNotConvert, _LEFT_ALONE), *_autograph.CONVERSION_RULES)


def converted_as_here(function: Callable) -> Callable:
    """`function` of a user's, converted by AutoGraph when the code that runs now is; from a module left alone."""
    return tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())


def in_xla_context(graph: tf.Graph) -> bool:
    """Whether a graph that is being traced, or one around it, is compiled by XLA as a whole (`jit_compile=True`)."""
    return _control_flow.GraphOrParentsInXlaContext(graph)


__all__ = ["XSpace", "converted_as_here", "in_xla_context", "keras", "tf"]
