"""How the library of the custom ops was built, and which of its kernels this processor runs."""

from __future__ import annotations

import ctypes

from tf_fusedrec.ops._library import LIBRARY_PATH, built_for


def built_with_cuda() -> bool:
    """Returns whether the ops have GPU kernels: the library of the device code lies beside the ops' library."""
    return LIBRARY_PATH.with_name("libfusedrec_cuda.so").exists()


def cpu_kernels() -> str:
    """Returns the instruction set of the CPU kernels in use, for example "AVX2 (x86-64-v3)"."""
    describe = ctypes.CDLL(str(LIBRARY_PATH)).fusedrec_cpu_kernels
    describe.restype = ctypes.c_char_p
    return describe().decode()


__all__ = ["built_for", "built_with_cuda", "cpu_kernels"]
