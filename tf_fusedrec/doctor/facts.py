"""Facts about installed packages, their builds, and this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops import _library

# Distributions of a report, and what an absent one is needed for.
DISTRIBUTIONS = {
    "tensorflow": "",
    "tf-keras": "",
    "keras": "",
    "numpy": "",
    "pyarrow": "",
    "tensorflow-recommenders-addons": "tf_fusedrec.tfra and FusedEmbedding(backend='tfra'): the extra tfra",
    "tf_fusedrec_cuda": "GPU kernels, unless a clone has compiled them",
    "horovod": "more than one process; docs/install.md says how to build it",
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        needed_for = DISTRIBUTIONS.get(distribution)
        return f"not installed; needed for {needed_for}" if needed_for else "not installed by pip"


def versions() -> dict[str, str]:
    """Version of each package and of the system, by name."""
    python = f"{platform.python_version()}, {platform.python_implementation()}"
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    return {
        "Python": python,
        "system": system,
        "tf_fusedrec": version_of("tf_fusedrec"),
        **{name: version_of(name) for name in DISTRIBUTIONS},
    }


def custom_ops() -> dict[str, str]:
    """How the custom ops were built, and which of their kernels run on this processor."""
    cuda = "yes" if _library.built_with_cuda() else "no; tf_fusedrec_cuda has them, or FUSEDREC_CUDA=1 builds them"
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return {
        "built for": f"TensorFlow {_library.built_for() or 'unknown'}",
        "GPU kernels": cuda,
        "CPU kernels": f"{_library.cpu_kernels()}, on {cores}",
    }


def gpus() -> list[str]:
    """Name and compute capability of each GPU that TensorFlow sees."""
    found = []
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        capability = ".".join(map(str, details.get("compute_capability", ("?",))))
        found.append(f"{details.get('device_name', device.name)}, compute capability {capability}")
    return found


def why_tfra_does_not_load() -> str | None:
    """The error of an installed TFRA that cannot be imported; None if TFRA is absent or loads."""
    if not is_installed("tensorflow_recommenders_addons"):
        return None
    try:
        importlib.import_module("tf_fusedrec.tfra.tfra_library")
    except (ImportError, AttributeError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {error}"
    return None
