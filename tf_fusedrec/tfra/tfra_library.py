"""The single import of TFRA: every module of this package imports `de`, TFRA's dynamic_embedding, from here.

TFRA is an extra, so modules that every user imports do not import this one.
"""

from __future__ import annotations

import contextlib
import io

from tf_fusedrec._tf_compat import tf

# At every import TFRA prints a notice about TensorFlow's savers and warns of a collection that is unused here.
_level = tf.get_logger().level
tf.get_logger().setLevel("ERROR")
try:
    with contextlib.redirect_stdout(io.StringIO()):
        import tensorflow_recommenders_addons.dynamic_embedding as de
        from tensorflow_recommenders_addons.dynamic_embedding.python.ops import dynamic_embedding_variable as _variables
except ModuleNotFoundError as error:
    raise ImportError(
        f"TensorFlow Recommenders Addons (TFRA) is not installed ({error}). tf_fusedrec.tfra and "
        "FusedEmbedding(backend='tfra') need it. Remedy: pip install "
        "tensorflow-recommenders-addons==0.8.1 typeguard (the extra tf_fusedrec[tfra]), with TensorFlow 2.16 and "
        "Python below 3.12; or use FusedEmbedding(backend='native')."
    ) from error
finally:
    tf.get_logger().setLevel(_level)

default_partition_fn = _variables.default_partition_fn


def forget_variable(name: str) -> None:
    """Releases a `de.Variable` that TFRA keeps, for the life of the process, for layers of the same name."""
    _variables.variable_scope._get_default_variable_store()._vars.pop(name, None)


__all__ = ["de", "default_partition_fn", "forget_variable"]
