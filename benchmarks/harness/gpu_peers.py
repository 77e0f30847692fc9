"""Peers of the benchmarks on a GPU: calls of PyTorch, and of CuPy and Triton where they are installed.

A peer is checked before anything is timed. It has the arrays of our call, and runs on the same stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.harness.roofline import Work


class Call(NamedTuple):
    """One call that is timed."""

    run: Callable[[], Any]
    work: Work
    check: Callable[[], None] = lambda: None  # raises AssertionError if the results of `run` are wrong


class Libraries:
    """The libraries of peers that can be imported.

    Args:
      names: Names of their modules.

    Attributes:
      left_out: Reason by name of each library that cannot be imported.
    """

    def __init__(self, names: Iterable[str]):
        self._modules: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        for name in names:
            try:
                self._modules[name] = importlib.import_module(name)
            except Exception as error:  # a library for another CUDA fails in many ways
                self.left_out[name] = f"{type(error).__name__}: {error}"

    def get(self, name: str) -> Any:
        """The module, or None."""
        return self._modules.get(name)
