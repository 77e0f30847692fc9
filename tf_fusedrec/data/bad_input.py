"""What is done with input that cannot be used: refuse it, or leave it out and say so. One policy for all kinds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

POLICIES = ("error", "skip")
_LOG = logging.getLogger("tf_fusedrec.data")


class BadInput:
    """Meets bad input by its policy.

    Args:
      policy: "error" raises at the first; "skip" leaves it out, with a line in the log that names it and counts.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"bad_rows must be one of {POLICIES}, got {policy!r}.")
        self.skips = policy == "skip"
        self._rows: dict[str, set[int]] = {}  # numbers of the rows left out of each place
        self._lock = threading.Lock()  # readers are threads

    @property
    def skipped_rows(self) -> int:
        """Distinct rows that this process has met and left out; a file whose footer it cannot read counts none."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def skipped_places(self) -> int:
        """Files and row groups where something was left out."""
        return len(self._rows)

    def meet(self, place: str, what: str, rows: Iterable[int] = ()) -> None:
        """Raises ValueError("place: what"), or logs it when it is new.

        Args:
          place: the file, and the row group in it.
          what: names the column, and the remedy.
          rows: numbers, in the row group, of the rows that are bad; none where all of the place is.
        """
        if not self.skips:
            raise ValueError(f"{place}: {what}")
        with self._lock:
            known = self._rows.get(place)
            new = set(rows) - (known or set())
            if known is not None and not new:
                return  # every epoch meets it again
            self._rows.setdefault(place, set()).update(new)
            told = f"{len(new)} rows; in all {self.skipped_rows} rows at {self.skipped_places} places"
        _LOG.warning("left out: %s: %s (%s)", place, what, told)
