"""What savers need in addition to rows: a table's counters, and the bits of bfloat16 in records.

Counters are a table's clock (files/manifest.py), and the step count and learning rates of its optimizer. NumPy has no
bfloat16, so records have its bits, <u2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.files.manifest import latest_clock


def counters_of(table: Any) -> dict[str, Any]:
    """The counters of a backend, JSON-able. None for what its optimizer does not count or restore."""
    iterations = getattr(table.optimizer, "iterations", None)
    return {
        "clock": int(table.clock),
        "iterations": None if iterations is None else int(iterations.numpy()),
        "learning_rate": getattr(table.optimizer, "rates", None),
    }


def restore_counters(table: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Sets the counters of a backend from what `counters_of` returned for each of its tables.

    The tables may have been in groups with different counters. The largest are taken: a row may seem older than it is,
    but never newer than the clock.
    """
    table.clock = latest_clock(entry["clock"] for entry in saved)
    iterations = [entry["iterations"] for entry in saved if entry["iterations"] is not None]
    if iterations:
        table.optimizer.iterations.assign(max(iterations))
    rates = [entry["learning_rate"] for entry in saved if entry.get("learning_rate")]
    if rates:
        table.optimizer.restore_rates(rates)


def numbers(field: np.ndarray) -> np.ndarray:
    """The numbers of a record's field."""
    return np.ascontiguousarray(field).view(tf.bfloat16.as_numpy_dtype) if field.dtype == "<u2" else field


def put_numbers(records: np.ndarray, field: str, values: Any, at: Any = ...) -> None:
    """Sets a field of records to numbers, rounded to its dtype."""
    if records.dtype[field].base == "<u2":
        values = np.asarray(values).astype(tf.bfloat16.as_numpy_dtype).view(np.uint16)
    records[field][at] = values
