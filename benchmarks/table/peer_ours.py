"""Our side of peers.py, in this project's interpreter: native tables under the peers' rules."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks.harness import rounds
from benchmarks.table.variants import Native
from benchmarks.table.work import DIM, all_ids
from tf_fusedrec import FeatureConfig, FusedEmbedding, keras, tf


class Pooled(Native):
    """Pools bags of L ids: takes ids <int64>[B, L] and returns the sums of their rows <float32>[B, D]."""

    def _make_layer(self, optimizer: Any) -> keras.layers.Layer:
        config = super()._make_layer(optimizer).get_config()
        pooled = FeatureConfig(name="ids", table="rows", combiner="sum")
        return FusedEmbedding.from_config({**config, "features": [vars(pooled)], "name": "pooled"})


def main(folder: str, rows: int, threads: int, bag: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    batches = [tf.constant(ids) for ids in np.load(pathlib.Path(folder) / "ids.npy")]
    gradients = tf.constant(np.load(pathlib.Path(folder) / "gradients.npy"))
    bags = [tf.reshape(ids, [-1, bag]) for ids in batches]
    variants = {
        "sequence": (Native("rowwise_adagrad_mean", DIM), batches, gradients),
        "pooled": (Pooled("rowwise_adagrad_mean", DIM), bags, gradients[: len(bags[0])]),
        "sgd": (Native("sgd", DIM), batches, gradients),
        "adam": (Native("adam", DIM), batches, gradients),
    }
    ids = all_ids(rows)
    for variant, _, _ in variants.values():
        variant.fill(ids)

    def step(name: str, n: int) -> tf.Tensor:
        variant, inputs, grads = variants[name]
        return variant.step(inputs[n % len(inputs)], grads)

    def check() -> None:
        for name in variants:
            for n in range(3):
                step(name, n)
            np.save(pathlib.Path(folder) / f"{name}.npy", step(name, 0).numpy())

    rounds.serve({name: functools.partial(step, name) for name in variants}, check, {})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
