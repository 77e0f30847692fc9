"""Whether a save is fit to be a checkpoint: numbers are finite, and dense weights are equal on all ranks.

Every rank judges the copies that it writes, behind training's back. Rank 0 compares before it writes the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_fusedrec.exchange import weight_equality

_CHUNK_BYTES = 1 << 24  # judged at once
CHOICES = ("refuse", "skip", "save")


class NotFinite(ValueError):
    """A weight, a row or a slot of a save is not finite."""


def _finite(values: np.ndarray) -> np.ndarray:
    """<bool> of the shape of `values`; bfloat16 comes as its bits, <u2."""
    return (values & 0x7F80) != 0x7F80 if values.dtype == "<u2" else np.isfinite(values)


def bad_row(table: str, ids: np.ndarray, records: np.ndarray) -> str | None:
    """The first row or slot that is not finite, in words; None when all are.

    Args:
      table: name of the table.
      ids: <int64>[n].
      records: <record>[n]; its numbers of kind f, and <u2, which are bfloat16, are looked at.
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


def bad_weight(weights: Sequence[tuple[str, np.ndarray]]) -> str | None:
    """The first weight that is not finite, in words; None when all are. Integers are."""
    for name, value in weights:
        if value.dtype.kind in "fcV" and not np.isfinite(value).all():
            return f"dense weight {name!r}"
    return None


def check_equal(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless all ranks have the same tables and equal dense weights.

    Args:
      ranks: what each rank tells: "tables" by name with their "spec", and "dense", the digests of its weights.
    """
    for rank, told in enumerate(ranks):
        specs, want = ({name: table["spec"] for name, table in r["tables"].items()} for r in (told, ranks[0]))
        if specs != want:
            raise ValueError(f"Rank {rank} has the tables {specs}, but rank 0 has {want}. Build the same model on all.")
    differs = weight_equality.difference(
        [[weight_equality.Digest(*digest) for digest in told["dense"]] for told in ranks]
    )
    if differs is not None:
        raise ValueError(
            f"Ranks do not hold the same dense weights: {differs}. A checkpoint would hold those of rank 0 for all; "
            "this save is refused, and earlier checkpoints stand. Build the same model on all ranks, compiled with "
            "collectives.distributed_optimizer, which gives all ranks one start and one gradient."
        )


def check_finite(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises NotFinite unless no rank tells of a number that is not finite ("not_finite", a list of words)."""
    found = [f"{what} (rank {rank})" for rank, told in enumerate(ranks) for what in told["not_finite"]]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise NotFinite(
            f"{', '.join(found[:3])}{more} is not finite, and a checkpoint must be; this save is refused, and earlier "
            "checkpoints stand. Load one of them (checkpoint.saves lists them) and look for the cause, or save "
            "as it is with not_finite='save'."
        )
