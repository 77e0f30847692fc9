"""Tokens per second of the input pipeline on one core, beside pyarrow alone. benchmarks.balance runs it in a process.

Both read two columns of lists and one of lengths. The pipeline plans the epoch from the lengths, reads, mixes, cuts and
returns tensors. pyarrow decodes the same row groups on one thread and drops the result.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.balance import lengths
from benchmarks.harness import harness
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches

COLUMNS = (Column("item_id", ragged=True), Column("timestamp", ragged=True, aligned_with="item_id"), Column("length"))
TARGET = 76_800
ITEMS = 100_000
EPOCHS = 8  # enough to make the 0.05 s that the construction of the dataset takes negligible


def write(folder: pathlib.Path, rows: int) -> np.ndarray:
    """Writes histories with Zipf items and rising times. Returns their lengths <int64>[rows]."""
    random, tokens = np.random.default_rng(1), lengths.lengths(rows)
    splits = pa.array(np.concatenate([[0], np.cumsum(tokens)]), pa.int32())
    items = random.zipf(1.2, tokens.sum()) % ITEMS
    times = 1_700_000_000 + np.cumsum(random.integers(0, 100, tokens.sum()))
    table = pa.table(
        {
            "item_id": pa.ListArray.from_arrays(splits, pa.array(items)),
            "timestamp": pa.ListArray.from_arrays(splits, pa.array(times)),
            "length": tokens,
        }
    )
    for part in range(4):  # row groups of 256 rows, as the converters write them
        piece = table.slice(part * rows // 4, (part + 1) * rows // 4 - part * rows // 4)
        pq.write_table(piece, folder / f"part-{part}.parquet", row_group_size=256)
    return tokens


def _pipeline(folder: pathlib.Path, check: np.ndarray | None = None) -> float:
    """Returns the seconds of EPOCHS epochs with their plans. Checks the lengths of the rows if `check` has them."""
    begin = time.perf_counter()
    data = ParquetFolder(folder, COLUMNS, shuffle_seed=0, shuffle_rows=1024, threads=1)
    found = []
    batches = TokenBatches(data, length_columns=["length"], target_tokens=TARGET, epochs=EPOCHS)
    for batch in batches.dataset(epochs=EPOCHS):
        if check is not None:
            found.append(batch["timestamp"].row_lengths().numpy())
    seconds = time.perf_counter() - begin
    if check is not None:
        harness.check_equal("lengths of the rows read", np.sort(np.concatenate(found)), np.sort(np.tile(check, EPOCHS)))
    return seconds


def _pyarrow(folder: pathlib.Path) -> float:
    names = [column.name for column in COLUMNS]
    begin = time.perf_counter()
    for file in sorted(folder.glob("*.parquet")) * EPOCHS:
        with pq.ParquetFile(file) as parquet:
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group, columns=names, use_threads=False)
    return time.perf_counter() - begin


def measure(quick: bool) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tokens = write(folder, 16384)
        _pipeline(folder, tokens)
        ours, theirs = [], []
        for _ in range(3 if quick else 9):
            ours.append(_pipeline(folder))
            theirs.append(_pyarrow(folder))
    return {
        "reader_tokens_per_s": float(EPOCHS * tokens.sum() / np.median(ours)),
        "pyarrow_tokens_per_s": float(EPOCHS * tokens.sum() / np.median(theirs)),
        "reader_ratio": float(np.median(np.divide(theirs, ours))),
    }
