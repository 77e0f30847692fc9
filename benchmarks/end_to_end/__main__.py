"""Question: how many users per second does HSTU train on, beside the same model in PyTorch?

    python -m benchmarks.end_to_end [--data DIR] [--peer PYTHON] [--quick] [--json FILE]

The model is configs/hstu_ml1m.yaml on MovieLens-1M. Both sides train one epoch of the same batches of 128 users, in
turns of TURN steps, on all cores. A step is forward, loss, backward and Adam. Batches are in memory. Ours are copied
into tensors in the step, and the peer's are padded in advance. --quick trains on the first batches only.

--peer names an interpreter with torch, and with fbgemm-gpu-cpu for the second form (see peer_torch.py). The loss and
all dense gradients of the first batch are compared before any timing, with equal weights and negatives and no dropout.
Without --peer there are figures of ours only.

Fields of the JSON file, for `ours`, `padded` and `jagged`:
  samples_per_s_<side>      users of a full batch / median time of their step
  ratio_vs_<form>           median step of the form / median step of ours
  loss_before, loss_after_<side>: loss of the first batch without dropout, before and after the epoch
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.end_to_end import peer_torch
from benchmarks.end_to_end.peer_torch import Users, read_batches, write_batches
from benchmarks.harness import harness, processes
from benchmarks.harness.processes import Remote
from benchmarks.retrieval_ml1m.__main__ import BATCH_USERS, CONFIG
from tf_fusedrec import keras, tf
from tf_fusedrec.data import ParquetFolder
from tf_fusedrec.data.rows import concat
from tf_fusedrec.models.build import columns, make_embedding, make_model
from tf_fusedrec.models.data_sets.layouts import read_items
from tf_fusedrec.models.experiment import Experiment, from_dict, load
from tf_fusedrec.models.experiment.model_config import RetrievalConfig
from tf_fusedrec.models.prepare import prepare_data
from tf_fusedrec.models.retrieval import HSTURetrieval

QUICK_BATCHES = 6
TURN = 2  # steps of a side before the other's turn
# Sums of up to 200 terms in another order, in two blocks. A time difference at the edge of a bucket may fall into the
# next one, because the peer's logarithm is rounded otherwise.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-3


def ragged(users: Users, catalogue: np.ndarray) -> dict[str, tf.RaggedTensor]:
    columns = {"item_id": catalogue[users.items], "timestamp": users.times}
    return {
        name: tf.RaggedTensor.from_row_splits(column, users.splits, validate=False) for name, column in columns.items()
    }


def dense_weights(model: HSTURetrieval) -> dict[str, tf.Variable]:
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


def ours(folder: str, experiment: Mapping[str, Any], threads: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    config, place = from_dict(experiment), pathlib.Path(folder)
    epoch, catalogue = read_batches(place / "batches.npz"), np.load(place / "catalogue.npy")
    keras.utils.set_random_seed(config.seed)
    model = make_model(config, make_embedding(config), catalogue, np.ones(len(catalogue), np.int64))
    assert isinstance(model, HSTURetrieval)
    adam = config.train
    model.compile(keras.optimizers.Adam(adam.learning_rate, beta_2=adam.beta_2, epsilon=adam.epsilon))
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

    processes.serve({"ours": step}, loss, {})


def write_epoch(experiment: Experiment, data: pathlib.Path, folder: pathlib.Path, most: int | None) -> list[int]:
    """Writes catalogue.npy and batches.npz. Returns the users of each batch."""
    rows = concat(list(ParquetFolder(data / "train", columns(experiment.model, "train")).read()))
    catalogue = np.sort(read_items(data)[0])
    order = np.random.default_rng(experiment.seed).permutation(rows.num_rows)
    epoch = []
    for begin in range(0, rows.num_rows, BATCH_USERS)[:most]:
        part = rows.take(order[begin : begin + BATCH_USERS])
        items, times = part.ragged("item_id"), part.ragged("timestamp")
        epoch.append(Users(np.searchsorted(catalogue, items.values), times.values, items.row_splits))
    np.save(folder / "catalogue.npy", catalogue)
    write_batches(folder / "batches.npz", epoch)
    return [len(users.splits) - 1 for users in epoch]


def peer_request(experiment: Experiment, folder: pathlib.Path, threads: int) -> dict[str, Any]:
    model, train = experiment.model, experiment.train
    assert isinstance(model, RetrievalConfig) and model.num_heads == 1
    names = ("qk_dim", "value_dim", "num_blocks", "dropout", "temperature", "num_negatives")
    sizes = {name: getattr(model, name) for name in names} | {"max_length": model.max_sequence_length}
    adam = {"lr": train.learning_rate, "betas": (0.9, train.beta_2), "eps": train.epsilon}
    return {"folder": str(folder), "sizes": sizes, "adam": adam, "threads": threads}


def check(folder: pathlib.Path, losses: dict[str, float]) -> None:
    wanted, reason = dict(np.load(folder / "check.npz")), "sums in another order, edges of buckets"
    for form, loss in losses.items():
        harness.check_close(f"loss, {form}", loss, wanted["loss"], relative=LOSS_TOLERANCE, reason=reason)
        got = np.load(folder / f"gradients_{form}.npz")
        for name in set(wanted) - {"loss", "negatives"}:
            what = f"gradient of {name}, {form}"
            harness.check_close(what, got[name], wanted[name], relative=GRADIENT_TOLERANCE, reason=reason)


def train(sides: dict[str, Remote], users: list[int]) -> dict[str, Any]:
    """Trains one epoch on every side in turns, after one step that traces or warms up. Returns the timing fields."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for name, side in sides.items():
        side.steps(name, 1)
    for turn, begin in enumerate(range(0, len(users), TURN)):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            seconds[name] += sides[name].steps(name, min(TURN, len(users) - begin))
    batch = max(users)
    full = [n for n in range(len(users)) if users[(n + 1) % len(users)] == batch]  # step 0 went to the warm-up
    medians = {name: float(np.median([steps[n] for n in full])) for name, steps in seconds.items()}
    fields: dict[str, Any] = {f"samples_per_s_{name}": batch / median for name, median in medians.items()}
    return fields | {f"ratio_vs_{name}": medians[name] / medians["ours"] for name in sides if name != "ours"}


def measure(experiment: Experiment, data: pathlib.Path, peer: str | None, quick: bool) -> dict[str, Any]:
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        users = write_epoch(experiment, data, folder, QUICK_BATCHES if quick else None)
        fields: dict[str, Any] = {"users": sum(users), "batch": max(users), "threads": threads}
        request: dict[str, Any] = {"folder": name, "experiment": experiment.to_dict(), "threads": threads}
        sides = {"ours": stack.enter_context(Remote(sys.executable, ours, **request))}
        fields["loss_before"] = float(np.load(folder / "check.npz")["loss"])
        if peer is None:
            print("no --peer was given: figures of ours only", flush=True)
        else:
            theirs = stack.enter_context(Remote(peer, peer_torch.peer, **peer_request(experiment, folder, threads)))
            if theirs.facts["missing"]:
                print(f"the peer is skipped, since its interpreter lacks it: {theirs.facts['missing']}", flush=True)
            else:
                check(folder, theirs.check())
                fields |= {"torch": theirs.facts["torch"], "jagged_skipped": theirs.facts["no_jagged"]}
                sides |= dict.fromkeys(theirs.facts["variants"], theirs)
        fields |= train(sides, users)
        return fields | {f"loss_after_{name}": side.check()[name] for name, side in sides.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, f"the first {QUICK_BATCHES} batches only")
    parser.add_argument("--data", default="../shared/data/ml-1m", help="folder with the ratings of MovieLens-1M")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch, and fbgemm-gpu-cpu if it can")
    arguments = parser.parse_args(argv)
    experiment = load(CONFIG, [f"data.input={json.dumps(arguments.data)}"])
    with tempfile.TemporaryDirectory() as folder:
        fields = measure(experiment, prepare_data(experiment, folder), arguments.peer, arguments.quick)
    harness.print_fields("one epoch of HSTU", fields)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
