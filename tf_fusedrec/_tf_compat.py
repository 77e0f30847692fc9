"""The one door to TensorFlow and Keras: every module of this package imports `tf` and `keras` from here.

TFRA 0.8.1 works with legacy Keras (the `tf_keras` package) only, and TensorFlow decides once, when it is
imported, which Keras `tf.keras` is. So the switch is set here, before TensorFlow is imported, and an import
that comes too late is refused instead of failing later in a layer nobody would suspect.
"""

import os
import sys

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
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace  # noqa: E402  What tf.profiler writes.

# AutoGraph leaves `keras` alone, but rewrites the sources of `tf_keras` at the first step of every process: 15 s on
# two cores. The list of modules that it leaves alone has no public name.
_autograph.CONVERSION_RULES = (_autograph.DoNotConvert("tf_keras"), *_autograph.CONVERSION_RULES)

__all__ = ["XSpace", "keras", "tf"]
