"""Our side of collisions.py, in this project's interpreter: a native table under FBGEMM's row-wise Adagrad."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np

from benchmarks.harness import rounds
from benchmarks.table.variants import Native
from tf_fusedrec import tf


def main(folder: str, rows: int, dim: int, interval: int, threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    place = pathlib.Path(folder)
    batches = [tf.constant(ids) for ids in np.load(place / "ids.npy")]
    gradients = tf.constant(np.load(place / "gradients.npy"))
    table = Native("rowwise_adagrad_mean", dim)
    table.fill(np.load(place / "resident.npy"))

    def step(n: int) -> tf.Tensor:
        return table.step(batches[n % len(batches)], gradients)

    def check() -> None:
        for n in range(interval):
            rows_out = step(n)
        np.save(place / "ours.npy", rows_out)

    rounds.serve({"ours": step}, check, {})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
