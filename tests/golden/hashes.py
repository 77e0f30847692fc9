"""Files of golden hashes: the bits that a program once computed, by its name. A change of the code keeps them."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parent


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Returns a hash of the types, shapes and bits of arrays."""
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        array = np.ascontiguousarray(array)
        state.update(f"{array.dtype.name}{array.shape}".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def read(name: str) -> dict[str, Any]:
    """Returns the hashes of tests/golden/<name>.json."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, hashes: dict[str, Any]) -> None:
    """Writes tests/golden/<name>.json."""
    (FOLDER / f"{name}.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
