"""Lengths of rows as logs have them, the cost of a row by its length, and files of such rows."""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tf_fusedrec.data.plan import Cost

MEAN, LONGEST, SIGMA = 600, 3000, 1.0
COST = Cost(1.0, 1.0 / MEAN)
ITEMS = 1000


def lengths(rows: int, seed: int = 0) -> np.ndarray:
    """Returns <int64>[rows] log-normal lengths with mean MEAN, cut at LONGEST."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows)
    scale = 1.0
    for _ in range(30):  # the cut lowers the mean, and the scale restores it
        scale *= MEAN / np.minimum(scale * drawn, LONGEST).mean()
    return np.maximum(np.rint(np.minimum(scale * drawn, LONGEST)), 1).astype(np.int64)


def write(folder: pathlib.Path, rows: int, *, seed: int, row_group_size: int) -> np.ndarray:
    """Writes histories with Zipf items and times 0, 1, 2 ... over all rows. Returns their lengths <int64>[rows]."""
    tokens = lengths(rows, seed)
    splits = pa.array(np.concatenate([[0], np.cumsum(tokens)]), pa.int32())
    items = np.random.default_rng(seed).zipf(1.2, tokens.sum()) % ITEMS
    lists = {"item_id": items, "timestamp": np.arange(tokens.sum())}
    columns = {name: pa.ListArray.from_arrays(splits, pa.array(values)) for name, values in lists.items()}
    pq.write_table(pa.table({**columns, "length": tokens}), folder / "a.parquet", row_group_size=row_group_size)
    return tokens
