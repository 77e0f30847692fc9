"""Our side of the benchmark: the retrieval model of an experiment, trained by Keras' train function.

It writes weights.npz, which the peer begins from, and check.npz: the negatives, the loss and the dense gradients of the
first batch without dropout.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.end_to_end import batches
from benchmarks.harness import rounds
from models.build import make_embedding, make_model
from models.experiment import from_dict
from models.retrieval import HSTURetrieval
from tf_fusedrec import keras, tf


def ragged(users: batches.Users, catalogue: np.ndarray) -> dict[str, tf.RaggedTensor]:
    """Returns the model's inputs."""
    columns = {"item_id": catalogue[users.items], "timestamp": users.times}
    return {
        name: tf.RaggedTensor.from_row_splits(column, users.splits, validate=False) for name, column in columns.items()
    }


def dense_weights(model: HSTURetrieval) -> dict[str, tf.Variable]:
    """Returns the weights by the names that the peer reads."""
    found = {"positions": model.positions.positions}
    for number, block in enumerate(model.blocks):
        found[f"projection_{number}"] = block.projection.kernel
        found[f"output_{number}"] = block.output_stage.projection.kernel
        found[f"output_bias_{number}"] = block.output_stage.projection.bias
        found[f"position_bias_{number}"] = block.bias_weights.position_weights
        found[f"time_bias_{number}"] = block.bias_weights.time_weights
    return found


def write_check(model: HSTURetrieval, first: Mapping[str, Any], folder: pathlib.Path) -> None:
    model(first)  # creates the weights
    weights = dense_weights(model)
    with tf.GradientTape() as tape:
        outputs = model(first, training=False)
        loss = tf.reduce_mean(model.position_losses(first, outputs))
    gradients = dict(zip(weights, tape.gradient(loss, list(weights.values()))))
    arrays = {name: tf.convert_to_tensor(gradient).numpy() for name, gradient in gradients.items()}
    np.savez(folder / "check.npz", negatives=outputs.negatives, loss=loss, **arrays)
    np.savez(folder / "weights.npz", items=outputs.items, **{name: weight.numpy() for name, weight in weights.items()})


def main(folder: str, experiment: Mapping[str, Any], threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    config, place = from_dict(experiment), pathlib.Path(folder)
    epoch, catalogue = batches.read(place / "batches.npz"), np.load(place / "catalogue.npy")
    keras.utils.set_random_seed(config.seed)
    model = make_model(config, make_embedding(config), catalogue, np.ones(len(catalogue), np.int64))
    assert isinstance(model, HSTURetrieval)
    adam = config.train
    model.compile(keras.optimizers.legacy.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon))
    first = ragged(epoch[0], catalogue)
    write_check(model, first, place)

    def forever() -> Iterator[dict[str, tf.RaggedTensor]]:
        while True:
            yield from (ragged(users, catalogue) for users in epoch)

    signature = {name: tf.RaggedTensorSpec([None, None], tf.int64) for name in first}
    data = iter(tf.data.Dataset.from_generator(forever, output_signature=signature).prefetch(2))
    train = model.make_train_function()

    def step(_: int) -> float:
        return float(train(data)["loss"])

    def loss() -> dict[str, float]:
        return {"ours": float(tf.reduce_mean(model.position_losses(first, model(first, training=False))))}

    rounds.serve({"ours": step}, loss, {})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
