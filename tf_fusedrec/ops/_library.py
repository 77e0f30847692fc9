"""Loads the compiled custom ops once. An error says why they cannot be loaded."""

from __future__ import annotations

import importlib
import pathlib
import types

from tf_fusedrec._tf_compat import tf

LIBRARY_PATH = pathlib.Path(__file__).with_name("_fusedrec_ops.so")
_REMEDY = "Remedy: pip install -e . --no-build-isolation (or `make test`) in the clone, with this TensorFlow installed."


def built_for() -> str | None:
    """Returns the TensorFlow version that the library was compiled against; None when the build did not record it."""
    try:
        return importlib.import_module("tf_fusedrec.ops._build_info").TENSORFLOW_VERSION
    except ModuleNotFoundError:
        return None


def load() -> types.ModuleType:
    """Returns the generated wrappers of the custom ops.

    Raises:
      ImportError: the library was not built, or was built for another TensorFlow.
    """
    if not LIBRARY_PATH.exists():
        raise ImportError(f"The custom ops are not built: {LIBRARY_PATH.name} is missing in tf_fusedrec/ops. {_REMEDY}")
    built, running = built_for(), tf.version.VERSION
    if built is not None and built != running:
        raise ImportError(
            f"The custom ops were built for TensorFlow {built}, but TensorFlow {running} is running; "
            f"custom ops are bound to the exact version. {_REMEDY}"
        )
    try:
        return tf.load_op_library(str(LIBRARY_PATH))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"The custom ops do not load under TensorFlow {running}: {error.message}. {_REMEDY}"
        ) from error


library = load()
