"""Loads the compiled custom ops once. An error says why they cannot be loaded.

The library lies in this folder, or in the package tf_fusedrec_cuda. That package has the same ops with their GPU
kernels, so it takes the place of a library here that has none.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import types

from tf_fusedrec._tf_compat import OPS_REMEDY, tf

_NAME = "_fusedrec_ops.so"
_DEVICE_CODE = "libfusedrec_cuda.so"
_HERE = pathlib.Path(__file__).parent
_CUDA_PACKAGE = "tf_fusedrec_cuda"


def _build_info(package: str) -> types.ModuleType | None:
    """Returns what the build recorded with the library in `package`; None without a record."""
    try:
        return importlib.import_module(f"{package}._build_info")
    except ModuleNotFoundError:
        return None


def find_library() -> pathlib.Path:
    """Returns the path of the library to load.

    Raises:
      ImportError: The installed tf_fusedrec_cuda is of another version than this package.
    """
    if (_HERE / _DEVICE_CODE).exists() or importlib.util.find_spec(_CUDA_PACKAGE) is None:
        return _HERE / _NAME
    other = _build_info(_CUDA_PACKAGE)
    own_version = getattr(_build_info(__package__), "VERSION", "unknown")
    version = getattr(other, "VERSION", "unknown")
    if other is None or own_version != version:
        raise ImportError(
            f"{_CUDA_PACKAGE} {version} is installed beside tf_fusedrec {own_version}; the versions must be equal. "
            f"Remedy: pip install the wheel of {_CUDA_PACKAGE} {own_version}, or pip uninstall {_CUDA_PACKAGE} to "
            "work without GPU kernels."
        )
    return pathlib.Path(str(other.__file__)).with_name(_NAME)


def built_for() -> str | None:
    """Returns the TensorFlow version that the library was compiled against; None when the build did not record it."""
    return getattr(_build_info(__package__), "TENSORFLOW_VERSION", None)


def load() -> tuple[pathlib.Path, types.ModuleType]:
    """Returns the path of the library, and the generated wrappers of the custom ops.

    Raises:
      ImportError: the library was not built, or does not load. _tf_compat.py has compared its TensorFlow.
    """
    path = find_library()
    if not path.exists():
        raise ImportError(f"The custom ops are not built: {_NAME} is missing in {path.parent}. {OPS_REMEDY}")
    try:
        return path, tf.load_op_library(str(path))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"The custom ops do not load under TensorFlow {tf.version.VERSION}: {error.message}. {OPS_REMEDY}"
        ) from error


LIBRARY_PATH, library = load()
