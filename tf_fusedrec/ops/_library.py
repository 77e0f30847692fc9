"""The compiled custom ops: where they are, how they were built, and their C functions.

The library is in this folder or in the package tf_fusedrec_cuda, which has the same ops with their GPU kernels. That
package replaces a library here that has none.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import pathlib
import types
from typing import NamedTuple

from tf_fusedrec._tf_compat import OPS_REMEDY, tf

_NAME = "_fusedrec_ops.so"
_DEVICE_CODE = "libfusedrec_cuda.so"
_HERE = pathlib.Path(__file__).parent
_CUDA_PACKAGE = "tf_fusedrec_cuda"
_TERMINATION_BYTES = 512


def _build_info(package: str) -> types.ModuleType | None:
    """Returns what the build recorded with the library in `package`; None without a record."""
    try:
        return importlib.import_module(f"{package}._build_info")
    except ModuleNotFoundError:
        return None


def find_library() -> pathlib.Path:
    """Returns the path of the library to load.

    Raises:
      ImportError: The versions of the installed tf_fusedrec_cuda and of this package differ.
    """
    if (_HERE / _DEVICE_CODE).exists() or importlib.util.find_spec(_CUDA_PACKAGE) is None:
        return _HERE / _NAME
    cuda = _build_info(_CUDA_PACKAGE)
    cuda_version = getattr(cuda, "VERSION", "unknown")
    version = getattr(_build_info(__package__), "VERSION", "unknown")
    if cuda is None or version != cuda_version:
        raise ImportError(
            f"{_CUDA_PACKAGE} {cuda_version} is installed beside tf_fusedrec {version}; the versions must be equal. "
            f"Remedy: pip install the wheel of {_CUDA_PACKAGE} {version}, or pip uninstall {_CUDA_PACKAGE} to "
            "work without GPU kernels."
        )
    return pathlib.Path(str(cuda.__file__)).with_name(_NAME)


def load() -> tuple[pathlib.Path, types.ModuleType]:
    """Returns the path of the library, and the generated wrappers of the custom ops.

    Raises:
      ImportError: The library was not built, or does not load. _tf_compat.py has compared its TensorFlow.
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
_functions = ctypes.CDLL(str(LIBRARY_PATH))  # the library is loaded already: this is the same copy
_functions.fusedrec_cpu_kernels.restype = ctypes.c_char_p
_functions.fusedrec_describe_marks.restype = ctypes.c_int64
_functions.fusedrec_describe_marks.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_functions.fusedrec_mark_collective.restype = None
_functions.fusedrec_mark_collective.argtypes = [ctypes.c_char_p, ctypes.c_int]
_functions.fusedrec_watch_termination.restype = None
_functions.fusedrec_watch_termination.argtypes = [ctypes.c_int, ctypes.c_double]
_functions.fusedrec_table_schema.restype = ctypes.c_char_p
_functions.fusedrec_check_table.restype = ctypes.c_char_p
_functions.fusedrec_check_table.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_int64, ctypes.c_char_p]
_functions.fusedrec_termination.restype = ctypes.c_int
_functions.fusedrec_termination.argtypes = [ctypes.c_char_p, ctypes.c_int64]


def built_for() -> str | None:
    """Returns the TensorFlow version that the library was compiled against; None when the build did not record it."""
    return getattr(_build_info(__package__), "TENSORFLOW_VERSION", None)


def built_with_cuda() -> bool:
    """Returns whether the ops have GPU kernels: the device code is in the folder of the ops' library."""
    return LIBRARY_PATH.with_name(_DEVICE_CODE).exists()


def cpu_kernels() -> str:
    """Returns the instruction set of the CPU kernels in use, for example "AVX2 (x86-64-v3)"."""
    return _functions.fusedrec_cpu_kernels().decode()


class Mark(NamedTuple):
    """State of one collective in this process."""

    name: str
    begun: int  # number of begins
    ended: int  # number of ends
    begun_ago_s: float  # seconds since its last begin
    ended_ago_s: float  # seconds since its last end; -0.001 for never


def mark_collective(value: tf.Tensor, *, name: str, ended: bool) -> tf.Tensor:
    """Passes a tensor through, and marks the begin or end of the named collective when the tensor is computed."""
    return library.fusedrec_mark_collective(value=value, collective=name, ended=ended)


@tf.RegisterGradient("Fusedrec>MarkCollective")
def _mark_collective_grad(_: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
    return grad


def mark_now(name: str, *, ended: bool) -> None:
    """Marks the begin or the end of a collective that Python calls."""
    _functions.fusedrec_mark_collective(name.encode(), int(ended))


def collective_marks() -> list[Mark]:
    """Returns all marks of this process, by name. The watchdog reads them."""
    size = 1 << 14
    while True:
        buffer = ctypes.create_string_buffer(size)
        used = _functions.fusedrec_describe_marks(buffer, size)
        if used <= size:
            break
        size = 2 * used
    fields = [line.rsplit("\t", 4) for line in buffer.raw[:used].decode().splitlines()]
    return [
        Mark(name, int(begun), int(ended), int(begun_ago) / 1e3, int(ended_ago) / 1e3)
        for name, begun, ended, begun_ago, ended_ago in fields
    ]


def watch_termination(rank: int, within_s: float) -> None:
    """Delays the end of this process by std::terminate, such as after an exception in Horovod's thread.

    A thread can read the cause and end the process. custom_ops/collective_marks/termination.cc has the reason.

    Args:
      rank: Rank of this process, for the line that is printed if no thread ends the process.
      within_s: Seconds after which the process ends with code 1.
    """
    _functions.fusedrec_watch_termination(rank, within_s)


def termination() -> str | None:
    """Returns the text of the exception that ends this process; None without such an end."""
    buffer = ctypes.create_string_buffer(_TERMINATION_BYTES)
    if not _functions.fusedrec_termination(buffer, _TERMINATION_BYTES):
        return None
    return buffer.value.decode(errors="replace")
