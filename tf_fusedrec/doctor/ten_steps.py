"""Trains ten steps on this process, or on those that horovodrun started. `trial.py` runs it.

Every number of processes trains the same model: the same global batches, mean losses, gradients averaged over ranks.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import numpy as np

from tf_fusedrec import optimizers
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.config import FeatureConfig, TableConfig
from tf_fusedrec.embedding import FusedEmbedding
from tf_fusedrec.exchange import collectives, gloo
from tf_fusedrec.exchange.dense_gradients import distributed_optimizer
from tf_fusedrec.exchange.horovod import built_features
from tf_fusedrec.exchange.topology import init
from tf_fusedrec.schedules import PipelinedModel

STEPS = 10
_BATCH = 128  # samples of a global batch
_IDS = 64
_DIM = 4


def train() -> dict[str, Any]:
    """Trains, and returns the losses, the rows of all ranks by id, seconds of a step, and the ranks' engines."""
    init()
    rank, size = collectives.rank(), collectives.size()
    keras.utils.set_random_seed(0)
    table = TableConfig("item", _DIM, optimizers.Adagrad(0.5))
    embedding = FusedEmbedding([FeatureConfig("item", "item")], [table])
    item = keras.Input([], dtype=tf.int64, name="item")
    model = PipelinedModel(item, keras.layers.Dense(1)(embedding({"item": item})["item"]))
    model.compile(distributed_optimizer(keras.optimizers.SGD(0.5)), "mse")

    ids = np.random.default_rng(0).integers(0, _IDS, _BATCH)
    labels = (ids % 2).astype(np.float32)
    batch = tf.data.Dataset.from_tensors((ids[rank::size], labels[rank::size]))
    first = model.fit(batch, verbose=0).history["loss"]  # traces the step
    began = time.perf_counter()
    losses = first + model.fit(batch, epochs=STEPS - 1, verbose=0).history["loss"]
    seconds = (time.perf_counter() - began) / (STEPS - 1)

    parts = collectives.all_gather_object(embedding.export_table("item"))
    rows = {int(item): row.tolist() for part in parts for item, row in zip(*part)}
    engines = {"exchange": collectives.exchange_name(), "has_gloo": gloo.LIBRARY_PATH.exists()}
    return {"losses": losses, "rows": rows, "seconds": seconds, "horovod": built_features(), **engines}


def main(answer: str) -> None:
    trained = train()
    if collectives.rank() == 0:
        pathlib.Path(answer).write_text(json.dumps(trained), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
