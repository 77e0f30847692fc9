"""How the cost models of benchmarks/scale.py are fitted: lines and all2alls through published cells.

An all2all among N workers takes alpha * (N - 1) + volume * (N - 1) / N: a message to everyone, and the bytes over the
bandwidth. What a group of N workers looks up takes a constant and a part that grows with N: the owner of the hottest
rows is asked by all. The papers print neither row bytes nor bandwidths, so both parts come from fitted cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.scale_published import cells

Key = tuple[str, str, str, str]


class Prediction(NamedTuple):
    value: float
    fitted: bool  # the cell, or one that says the same, fixed a constant of the model


@dataclasses.dataclass(frozen=True)
class Line:
    """constant + slope * N, seconds."""

    constant: float
    slope: float

    @classmethod
    def through(cls, n: float, at_n: float, m: float, at_m: float) -> Line:
        slope = (at_m - at_n) / (m - n)
        return cls(at_n - slope * n, slope)

    def at(self, n: float) -> float:
        return self.constant + self.slope * n


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Seconds of one all2all among N workers."""

    alpha: float  # per message
    volume: float  # bytes that a worker sends / bandwidth

    @classmethod
    def through(cls, n: int, at_n: float, m: int, at_m: float) -> AllToAll:
        """Solves alpha (N - 1) + volume (N - 1) / N for two sizes."""
        # Divided by N - 1 it is a line in 1 / N.
        line = Line.through(1 / n, at_n / (n - 1), 1 / m, at_m / (m - 1))
        return cls(line.constant, line.slope)

    def at(self, n: int) -> float:
        return (n - 1) * (self.alpha + self.volume / n)


def replica_sync_s(table_bytes: float, groups: int, workers: int, bytes_per_s: float) -> float:
    """2D-SP, equation 1: a ring all-reduce of all rows of a worker among its replicas."""
    return 2 * table_bytes * (groups - 1) / (workers * bytes_per_s)


def printed() -> Mapping[Key, float | None]:
    """All cells, by key."""
    return {cell.key: cell.value for cell in cells()}


def value_of(table: Mapping[Key, float | None], *key: str) -> float:
    """A printed figure that is there."""
    value = table[(key[0], key[1], key[2], key[3])]
    assert value is not None, key
    return value
