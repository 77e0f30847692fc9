"""Tokens per second of the input pipeline on one core, beside pyarrow alone. benchmarks.balance runs it in a process.

Both read two columns of lists and one of lengths. The pipeline plans the epoch from the lengths, reads, mixes, cuts and
returns tensors. pyarrow decodes the same row groups on one thread and drops the result.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np
import pyarrow.parquet as pq

from benchmarks.balance.lengths import write
from benchmarks.harness import harness
from tf_fusedrec import tf
from tf_fusedrec.data import Column, ParquetFolder, TokenBatches

COLUMNS = (Column("item_id", ragged=True), Column("timestamp", ragged=True, aligned_with="item_id"), Column("length"))
TARGET = 76_800
EPOCHS = 8  # enough to make the 0.05 s that the construction of the dataset takes negligible


def pipeline(folder: pathlib.Path) -> list[tf.RaggedTensor]:
    """Reads EPOCHS epochs with their plans. Returns the times of all batches."""
    data = ParquetFolder(folder, COLUMNS, shuffle_seed=0, shuffle_rows=1024, threads=1)
    batches = TokenBatches(data, length_columns=["length"], target_tokens=TARGET, epochs=EPOCHS)
    return [batch["timestamp"] for batch in batches.dataset(epochs=EPOCHS)]


def plain_read(folder: pathlib.Path) -> None:
    for _ in range(EPOCHS):
        with pq.ParquetFile(folder / "a.parquet") as parquet:
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group, columns=[column.name for column in COLUMNS], use_threads=False)


def measure(rows: int, repeats: int) -> dict[str, float]:
    """Returns the pipeline's tokens per second over pyarrow's."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        tokens = write(folder, rows, seed=0, row_group_size=256)
        got = np.concatenate([times.row_lengths().numpy() for times in pipeline(folder)])
        harness.check_equal("lengths of the rows read", np.sort(got), np.sort(np.tile(tokens, EPOCHS)))
        calls = {"ours": lambda: pipeline(folder), "pyarrow": lambda: plain_read(folder)}
        times = harness.measure(calls, warmup=0, repeats=repeats)
    return {"reader_ratio": times["pyarrow"].median_s / times["ours"].median_s}
