"""Keras 3 iterates over inputs of fit, evaluate and predict equally often on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras

Arguments = tuple[tuple, dict[str, Any]]  # positional and named


@contextlib.contextmanager
def equal_lengths(model: keras.Model, verb: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """As in legacy_inputs.py."""
    yield args, kwargs
