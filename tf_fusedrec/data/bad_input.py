"""Handling of unusable input: refuses it, or skips and logs it. One policy applies to all kinds of bad input."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

POLICIES = ("error", "skip")
_LOG = logging.getLogger("tf_fusedrec.data")


class BadInput:
    """Handles bad input by a policy.

    Args:
      policy: "error" raises for the first bad input; "skip" skips it, with a line in the log that names and counts it.

    Raises:
      ValueError: the policy is unknown.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"bad_rows must be one of {POLICIES}, got {policy!r}.")
        self.skips = policy == "skip"
        self._rows: dict[str, set[int]] = {}  # numbers of the skipped rows, by place
        self._lock = threading.Lock()  # Several threads read.

    @property
    def skipped_rows(self) -> int:
        """Number of distinct rows skipped by this process. A file with an unreadable footer counts no rows."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def skipped_places(self) -> int:
        """Number of files and row groups with skipped input."""
        return len(self._rows)

    def handle(self, place: str, fault: str, rows: Iterable[int] = ()) -> None:
        """Raises ValueError("place: fault"), or logs the fault if it is new.

        Args:
          place: File, and row group in it.
          fault: Words that name the column, the fault and the remedy.
          rows: Numbers of the bad rows in the row group; none if the whole place is bad.

        Raises:
          ValueError: under policy "error".
        """
        if not self.skips:
            raise ValueError(f"{place}: {fault}")
        with self._lock:
            known = self._rows.get(place)
            new = set(rows) - (known or set())
            if known is not None and not new:
                return  # Every epoch meets the same bad input again.
            self._rows.setdefault(place, set()).update(new)
            counts = f"{len(new)} rows; in all {self.skipped_rows} rows at {self.skipped_places} places"
        _LOG.warning("skipped: %s: %s (%s)", place, fault, counts)
