"""The single import of TensorFlow and Keras: every module of this package imports `tf` and `keras` from here.

TFRA 0.8.1 works with legacy Keras (the `tf_keras` package) only. TensorFlow chooses the Keras behind `tf.keras` once,
when it is imported. This module therefore selects legacy Keras before it imports TensorFlow. It refuses an import that
comes too late, because a layer would fail later for no visible reason.
"""

import os
import sys
from collections.abc import Callable

if sys.version_info < (3, 10):
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

_NEEDED = "tf_fusedrec needs legacy Keras (tf_keras) with the number of TensorFlow"

try:
    import tensorflow as tf
    import tf_keras as keras
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("tf_keras"):
        raise
    raise ImportError(f"{_NEEDED}, but none is installed. Remedy: pip install 'tf-keras==2.16.*' for 2.16.") from error
if keras.__version__.split(".")[:2] != tf.version.VERSION.split(".")[:2]:
    raise ImportError(
        f"{_NEEDED}, but tf_keras {keras.__version__} is installed beside TensorFlow {tf.version.VERSION}. "
        f"Remedy: pip install 'tf-keras=={tf.version.VERSION.rpartition('.')[0]}.*'."
    )

from tensorflow.python.autograph.core import config as _autograph  # noqa: E402
from tensorflow.python.ops import control_flow_util as _control_flow  # noqa: E402
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # noqa: E402  The format of tf.profiler's files.

# AutoGraph leaves `keras` alone, but rewrites the sources of other packages at the first step of every process. That
# takes 15 s for `tf_keras` and for TFRA, and 3 s for the layers here. Their code does not need it. TensorFlow has no
# public list of modules to skip. Keras still converts a user's layers, and converted_as_here a user's functions.
_LEFT_ALONE = ("tf_keras", "tensorflow_recommenders_addons", "tf_fusedrec")
_autograph.CONVERSION_RULES = (*map(_autograph.DoNotConvert, _LEFT_ALONE), *_autograph.CONVERSION_RULES)


def converted_as_here(function: Callable) -> Callable:
    """Converts a user's function by AutoGraph if the calling code is converted. For calls from skipped modules."""
    return tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())


def in_xla_context(graph: tf.Graph) -> bool:
    """Whether XLA compiles a traced graph, or a graph around it, as a whole (`jit_compile=True`)."""
    return _control_flow.GraphOrParentsInXlaContext(graph)


KERAS_3 = "comes from Keras 3. Remedy: the same of tf_fusedrec.keras; docs/install.md says what works beside Keras 3."


def of_keras_3(value: object) -> bool:
    """Whether a model, layer, optimizer, loss, metric or symbolic tensor is one of Keras 3."""
    return any(kind.__module__.split(".")[0] == "keras" for kind in type(value).__mro__)


def in_keras_3_call() -> bool:
    """Whether a layer or model of Keras 3 calls. It does not see the weights of a legacy layer, so it trains none."""
    state = sys.modules.get("keras.src.backend.common.global_state")  # Keras 3 has no public name for its running call
    return state is not None and state.get_global_attribute("current_call_ctx") is not None


__all__ = ["KERAS_3", "XSpace", "converted_as_here", "in_keras_3_call", "in_xla_context", "keras", "of_keras_3", "tf"]
