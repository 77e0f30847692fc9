"""Validation of a save: all numbers are finite, and dense weights are equal on all ranks.

Every rank checks its own copies in the background thread. Rank 0 compares the reports before it writes the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.exchange import weight_equality

_CHUNK_BYTES = 1 << 24  # bytes checked at once
CHOICES = ("refuse", "skip", "save")


class NotFinite(ValueError):
    """A weight, a row or a slot of a save is not finite."""


def _finite(values: np.ndarray) -> np.ndarray:
    """<bool> mask of the finite `values`. A dtype <u2 holds the bits of bfloat16."""
    return (values & 0x7F80) != 0x7F80 if values.dtype == "<u2" else np.isfinite(values)


def non_finite_row(table: str, ids: np.ndarray, records: np.ndarray) -> str | None:
    """Words that name the first non-finite row or slot; None if all are finite.

    Args:
      table: Name of the table.
      ids: <int64>[n].
      records: <record>[n]. Fields of floating dtypes and of <u2, the bits of bfloat16, are checked.
    """
    kinds = {field: records.dtype[field].base for field in records.dtype.names or ()}
    fields = [field for field, kind in kinds.items() if kind.kind == "f" or kind == "<u2"]
    step = max(_CHUNK_BYTES // max(records.dtype.itemsize, 1), 1)
    for begin in range(0, len(ids), step):
        for field in fields:
            finite = _finite(records[field][begin : begin + step]).reshape(len(ids[begin : begin + step]), -1)
            if not finite.all():
                row = begin + int(np.flatnonzero(~finite.all(axis=1))[0])
                return f"{field!r} of id {ids[row]} of table {table!r}"
    return None


def non_finite_weight(weights: Sequence[tuple[str, np.ndarray]]) -> str | None:
    """Words that name the first non-finite weight; None if all are finite. Integers are always finite."""
    for name, value in weights:
        if value.dtype.kind in "fcV" and not np.isfinite(value).all():
            return f"dense weight {name!r}"
    return None


def check_equal(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all ranks have the same tables and equal dense weights.

    Args:
      ranks: Report of each rank: "tables", whose entries have a "spec", and "dense", the digests of its weights.
    """
    for rank, report in enumerate(ranks):
        specs, want = ({name: table["spec"] for name, table in r["tables"].items()} for r in (report, ranks[0]))
        if specs != want:
            raise ValueError(
                f"Rank {rank} has the tables {specs}, but rank 0 has {want}. Build the same model on all ranks."
            )
    difference = weight_equality.difference(
        [[weight_equality.Digest(*digest) for digest in report["dense"]] for report in ranks]
    )
    if difference is not None:
        raise ValueError(
            f"Ranks do not hold the same dense weights: {difference}. This save is refused, because a checkpoint keeps "
            "the weights of rank 0 only; earlier checkpoints stay. Build the same model on all ranks and compile it "
            "with collectives.distributed_optimizer, which gives all ranks equal initial weights and gradients."
        )


def check_finite(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises NotFinite if the report of any rank names a non-finite number under "not_finite"."""
    found = [f"{words} (rank {rank})" for rank, report in enumerate(ranks) for words in report["not_finite"]]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise NotFinite(
            f"{', '.join(found[:3])}{more} is not finite, but a checkpoint must be. This save is refused, and earlier "
            "checkpoints stay. Load an earlier save (checkpoint.saves lists them) and look for the cause, such as a "
            "learning rate that is too high or a NaN in the data. not_finite='save' saves anyway."
        )
