"""A fault in the source of a kernel."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault, and the checks that must find it."""

    name: str
    op: str
    path: str  # below custom_ops
    old: str
    new: str
    only: str = ""  # part of the names of the checks that find it soonest
    words: str = ""  # words in the output of the run; empty: any failure counts
