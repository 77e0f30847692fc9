"""The pairs of TensorFlow and Python that this package is for. pyproject.toml and docs/install.md follow this file."""

from __future__ import annotations

import re
from typing import NamedTuple

OLDEST_PYTHON = 10
# Minor number of TensorFlow 2 -> minor number of the newest Python 3 that TensorFlow has wheels for.
NEWEST_PYTHON = {16: 12, 17: 12, 18: 12, 19: 12, 20: 13, 21: 13}


class Pair(NamedTuple):
    """A release of TensorFlow, for example "2.21.0", and a minor version of Python, for example "3.12"."""

    tensorflow: str
    python: str

    @property
    def minor(self) -> str:
        """The number that tf-keras shares with TensorFlow, for example "2.21"."""
        return self.tensorflow.rpartition(".")[0]

    def requirements(self) -> list[str]:
        return [f"tensorflow=={self.tensorflow}", f"tf-keras=={self.minor}.*"]


def pair(tensorflow: str, python: str) -> Pair:
    """Checks a pair.

    Raises:
      ValueError: A version is malformed, or TensorFlow has no wheels for this Python.
    """
    release, minor_python = re.fullmatch(r"2\.(\d+)\.\d+", tensorflow), re.fullmatch(r"3\.(\d+)", python)
    if release is None or int(release[1]) not in NEWEST_PYTHON:
        raise ValueError(
            f"TENSORFLOW must be a release from 2.{min(NEWEST_PYTHON)} to 2.{max(NEWEST_PYTHON)}, "
            f"got {tensorflow!r}. Name one in full, for example 2.21.0."
        )
    newest = NEWEST_PYTHON[int(release[1])]
    if minor_python is None or not OLDEST_PYTHON <= int(minor_python[1]) <= newest:
        raise ValueError(
            f"PYTHON must be a version from 3.{OLDEST_PYTHON} to 3.{newest} for TensorFlow {tensorflow}, "
            f"got {python!r}. Choose one of these, or a newer TensorFlow."
        )
    return Pair(tensorflow, python)
