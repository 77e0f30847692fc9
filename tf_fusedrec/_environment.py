"""Checks the environment before TensorFlow loads, which takes seconds: Python, Keras and the versions of pip's records.

Keras is that of TensorFlow: Keras 3, or tf_keras where the environment has TF_USE_LEGACY_KERAS=1, as a program of TFRA
0.8.1 needs it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import sys

if sys.version_info < (3, 10):  # noqa: UP036  Messages for a Python that pip would not have chosen.
    raise ImportError(
        f"tf_fusedrec needs Python 3.10 to 3.14, but this is Python {'.'.join(map(str, sys.version_info[:3]))}. "
        "Remedy: make an environment with a newer Python, and install the wheel for it there."
    )

_SWITCH = "TF_USE_LEGACY_KERAS"
KERAS_IS_LEGACY = os.environ.get(_SWITCH) in ("1", "true", "True")  # as TensorFlow decides
_backend = os.environ.get("KERAS_BACKEND", "tensorflow")
if not KERAS_IS_LEGACY and _backend != "tensorflow":
    raise ImportError(
        f"tf_fusedrec needs Keras 3 with its TensorFlow backend, but the environment has KERAS_BACKEND={_backend}. "
        "Remedy: unset KERAS_BACKEND or set it to tensorflow, before anything imports keras."
    )

OPS_REMEDY = (
    "Remedy: install the wheel for this TensorFlow, or in the clone, with this TensorFlow installed: "
    "pip install -e . --no-build-isolation."
)
_NEEDED = "tf_fusedrec needs legacy Keras (tf_keras) with the number of TensorFlow"
# Number of TensorFlow without a tf_keras of its number -> the one that passed the tests beside it. That one requires
# another TensorFlow.
_TESTED_TF_KERAS = {"2.22": "2.21"}
_OLDEST_KERAS_3 = (3, 9)  # the first with keras.Input(ragged=True)


def check_versions(tensorflow: str | None, keras_version: str | None) -> None:
    """Checks that the ops here and the chosen Keras suit this TensorFlow.

    Args:
      tensorflow, keras_version: Their versions; None where unknown.

    Raises:
      ImportError: They do not.
    """
    numbers = keras_version.split(".")[:2] if keras_version else []
    number = ".".join(tensorflow.split(".")[:2]) if tensorflow else ""
    tested = _TESTED_TF_KERAS.get(number, number)
    if KERAS_IS_LEGACY and number and numbers and ".".join(numbers) not in (number, tested):
        raise ImportError(
            f"{_NEEDED}, but tf_keras {keras_version} is installed beside TensorFlow {tensorflow}. "
            f"Remedy: pip install --no-deps 'tf-keras=={tested}.*'."
        )
    if not KERAS_IS_LEGACY and numbers and tuple(map(int, numbers)) < _OLDEST_KERAS_3:
        raise ImportError(
            f"tf_fusedrec needs Keras {'.'.join(map(str, _OLDEST_KERAS_3))} or newer, but keras {keras_version} is "
            f"installed. Remedy: pip install --upgrade keras, or set {_SWITCH}=1 in the environment for tf_keras."
        )
    record = pathlib.Path(__file__).parent / "ops" / "_build_info.py"  # setup.py writes it with the ops
    built = runpy.run_path(str(record)).get("TENSORFLOW_VERSION") if record.exists() else None
    # TensorFlow writes 2.22.0-rc0, and pip 2.22.0rc0.
    if tensorflow and built and built.replace("-", "") != tensorflow.replace("-", ""):
        raise ImportError(
            f"The custom ops were built for TensorFlow {built}, but TensorFlow {tensorflow} is installed; "
            f"custom ops are bound to the exact version. {OPS_REMEDY}"
        )


def _installed(name: str) -> str | None:
    """The version of an installed release or candidate; None where its name is another one, as tensorflow-cpu."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if re.fullmatch(r"[\d.]+(rc\d+)?", version) else None


KERAS_PACKAGE = "tf_keras" if KERAS_IS_LEGACY else "keras"


def check_installed() -> None:
    """Raises ImportError unless pip has a TensorFlow and a Keras that suit each other and the ops here."""
    check_versions(_installed("tensorflow"), _installed(KERAS_PACKAGE.replace("_", "-")))
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(KERAS_PACKAGE) is not None:
            return
    remedy = "tf-keras==2.16.*' for 2.16" if KERAS_IS_LEGACY else "keras>=3.9'"
    needed = _NEEDED if KERAS_IS_LEGACY else "tf_fusedrec needs Keras 3"
    raise ImportError(f"{needed}, but none is installed. Remedy: pip install '{remedy}.")


check_installed()
