"""Prints versions, builds, kernels in use and GPUs, and trains ten steps."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from tf_fusedrec._tf_compat import KERAS_IS_LEGACY, keras, tf
from tf_fusedrec.doctor import trial
from tf_fusedrec.doctor.ten_steps import STEPS
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
    return {
        "Python": f"{platform.python_version()}, {platform.python_implementation()}",
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        **{name: version_of(name) for name in ("tf_fusedrec", *DISTRIBUTIONS)},
        "Keras in use": f"{keras.__name__} {keras.__version__}",
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
    names = []
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        capability = ".".join(map(str, details.get("compute_capability", ("?",))))
        names.append(f"{details.get('device_name', device.name)}, compute capability {capability}")
    return names


def why_tfra_does_not_load() -> str | None:
    """The error of an installed TFRA that cannot be imported; None if TFRA is absent, loads, or lacks its Keras."""
    if not (KERAS_IS_LEGACY and is_installed("tensorflow_recommenders_addons")):
        return None
    try:
        importlib.import_module("tf_fusedrec.tfra.tfra_library")
    except (ImportError, AttributeError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def summary(answer: Mapping[str, Any]) -> str:
    losses = answer["losses"]
    return f"{STEPS} steps, {1e3 * answer['seconds']:.1f} ms each, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def report(say: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """Returns the parts by title; "failed" has the errors. `say` gets each line as soon as it is known."""
    parts: dict[str, dict[str, str]] = {"failed": {}}

    def add(title: str, fields: Mapping[str, str]) -> None:
        if title not in parts:
            say(title)
        parts.setdefault(title, {}).update(fields)
        width = max(13 if title == "training" else 0, *map(len, fields))
        for name, value in fields.items():
            say(f"  {name.ljust(width)}  {value}")

    def fail(name: str, error: object) -> None:
        parts["failed"][name] = str(error)
        say(f"  {name} FAILED: {error}")

    add("versions", versions())
    if (error := why_tfra_does_not_load()) is not None:
        fail("TFRA", error)
    add("custom ops", custom_ops())
    add("GPU", {f"device {number}": name for number, name in enumerate(gpus())} or {"devices": "none"})
    parts["training"] = {}
    say("training")
    single = None
    try:
        single = trial.run(1)
        add("training", {"one process": summary(single)})
    except trial.TrialFailed as error:
        fail("one process", error)
    if not is_installed("horovod"):
        add("training", {"two processes": "not tried, because Horovod is not installed"})
        return parts
    try:
        several = trial.run(2)
        if single is not None:
            trial.check_equal(single, several)
        add("training", {"two processes": f"{summary(several)}; rows are those of one process"})
        add("training", {"Horovod": f"built with {', '.join(several['horovod'])}"})
        lacks = "" if several["has_gloo"] else "; this installation was built without gloo"
        add("training", {"exchange": several["exchange"] + lacks})
    except trial.TrialFailed as error:
        fail("two processes", error)
    return parts
