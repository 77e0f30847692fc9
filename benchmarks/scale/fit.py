"""The fit of the cost models of benchmarks.scale: lines and all-to-alls through published cells.

An all-to-all among N workers takes alpha * (N - 1) + volume * (N - 1) / N. The first part is a message to every other
worker, the second the bytes over the bandwidth. A lookup in a group of N workers takes a constant and a part that grows
with N. All workers ask the owner of the hottest rows. The papers print neither row bytes nor bandwidths, so that both
parts come from fitted cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.scale.published import cells

Key = tuple[str, str, str, str]


class Prediction(NamedTuple):
    value: float
    fitted: bool  # whether this cell, or an equivalent one, fixed a constant of the model


@dataclasses.dataclass(frozen=True)
class Line:
    """constant + slope * N, in seconds."""

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
    """Seconds of one all-to-all among N workers."""

    alpha: float  # per message
    volume: float  # sent bytes of a worker / bandwidth

    @classmethod
    def through(cls, n: int, at_n: float, m: int, at_m: float) -> AllToAll:
        """Solves alpha (N - 1) + volume (N - 1) / N for two sizes."""
        # Division by N - 1 makes it a line in 1 / N.
        line = Line.through(1 / n, at_n / (n - 1), 1 / m, at_m / (m - 1))
        return cls(line.constant, line.slope)

    def at(self, n: int) -> float:
        return (n - 1) * (self.alpha + self.volume / n)


def replica_sync_s(table_bytes: float, groups: int, workers: int, bytes_per_s: float) -> float:
    """Returns the seconds of a ring all-reduce of a worker's rows among its replicas (2D-SP, equation 1)."""
    return 2 * table_bytes * (groups - 1) / (workers * bytes_per_s)


def printed() -> Mapping[Key, float | None]:
    """Returns the value of all cells, by key."""
    return {cell.key: cell.value for cell in cells()}


def value_of(table: Mapping[Key, float | None], *key: str) -> float:
    """Returns a figure that the paper prints."""
    value = table[(key[0], key[1], key[2], key[3])]
    assert value is not None, key
    return value
