"""The epoch's batches as arrays in a folder, which both interpreters read. NumPy only."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Users(NamedTuple):
    """One batch of B users with T events in all."""

    items: np.ndarray  # <int64>[T], places in the ascending catalogue
    times: np.ndarray  # <int64>[T], seconds, ascending for each user
    splits: np.ndarray  # <int64>[B+1], user b has the events splits[b]:splits[b+1]


def write(path: pathlib.Path, batches: Sequence[Users]) -> None:
    np.savez(
        path, **{f"{name}_{n}": array for n, users in enumerate(batches) for name, array in users._asdict().items()}
    )


def read(path: pathlib.Path) -> list[Users]:
    with np.load(path) as arrays:
        count = len(arrays.files) // len(Users._fields)
        return [Users(*(arrays[f"{name}_{n}"] for name in Users._fields)) for n in range(count)]
