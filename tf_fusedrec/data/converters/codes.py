"""Numbers the values of a column: code 0 means missing, the sorted values count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_fusedrec.data.rows import Ragged, splits_of


def numbered(values: Sequence[Any]) -> tuple[np.ndarray, list]:
    """Codes <int64>[N] of values, None being missing, and the sorted values of the codes 1, 2, ..."""
    distinct = sorted({value for value in values if value is not None})
    code_of = {value: code for code, value in enumerate(distinct, start=1)}
    return np.array([code_of.get(value, 0) for value in values], np.int64), distinct


def numbered_lists(values: Sequence[Sequence[str]]) -> tuple[Ragged, list[str]]:
    """Codes of lists of values, one row for each list, and the sorted values of the codes 1, 2, ..."""
    flat, distinct = numbered([value for one in values for value in one])
    return Ragged(flat, splits_of(np.array([len(one) for one in values], np.int64))), distinct
