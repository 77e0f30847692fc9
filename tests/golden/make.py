"""Writes the golden files of this version: small files that every later version must read.

    python -m tests.golden.make          # into tests/golden/<version>, which must not exist

    checkpoint/       a full save and a delta: evicted, removed and waiting ids, momentum, bfloat16, dense weights
    export-stock/     a SavedModel of TensorFlow's operations alone, and export-ours/ with those of this package
    delta-stock/ the changes of a further step to export-stock/, and delta-ours/, both without the program in them
    apply_delta.py    this program, which is the same in both
    expected.json     rows, slots and answers, as numbers

Each version makes its golden files once. A failing test means that this version cannot read files of an earlier one.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from typing import Any

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import checkpoint, keras, tf

FOLDER = pathlib.Path(__file__).parent
IDS = [*range(12), -1, 2**63 - 1, -(2**63)]  # only some have rows
OPS = ("stock", "ours")


def make_model() -> tuple[keras.Model, Any]:
    """Returns a model with every kind of state, and its embedding."""
    tables = [
        fr.TableConfig(
            "item", 3, fr.optimizers.SGD(0.25, momentum=0.5), fr.Uniform(0.0, 1.0),
            limits=fr.Limits(max_rows_per_rank=10, eviction="lru", admission_count=2), record_tombstones=True,
        ),
        fr.TableConfig(
            "user", 2, fr.optimizers.Adagrad(0.25, 0.1), dtype="bfloat16", unknown="zeros", record_tombstones=True
        ),
    ]  # fmt: skip
    embedding = fr.FusedEmbedding([fr.FeatureConfig(name, name) for name in ("item", "user")], tables)
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in ("item", "user")}
    rows = embedding(inputs)
    both = tf.concat([rows["item"], tf.cast(rows["user"], tf.float32)], axis=1)
    model = fr.schedules.PipelinedModel(inputs, keras.layers.Dense(2)(both))
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.legacy.Adam(0.1)), "mse")
    return model, embedding


def train(model: keras.Model, first: int) -> None:
    """Makes eight steps. Some ids get a row of "item", others wait for admission."""
    for step in range(first, first + 8):
        ids = np.array([step // 2 % 16, 100 + step, -1, 2**63 - 1])
        batch = {"item": tf.constant(ids), "user": tf.constant(ids[::-1].copy())}
        model.fit(tf.data.Dataset.from_tensors((batch, tf.ones([4, 2]))), verbose=0)


def state(embedding: Any) -> dict[str, Any]:
    """Returns every number of every record, by table, section and id."""
    tables: dict[str, Any] = {}
    for group in embedding.internals.groups:
        for name in group.table.names:
            for section in group.table.sections_of(name):
                ids, records = group.table.snapshot(name, section)
                named = {
                    str(i): {f: np.asarray(record[f]).tolist() for f in records.dtype.names if f != "pool"}
                    for i, record in zip(ids.tolist(), records)
                }
                tables[f"{name}.{section}"] = dict(sorted(named.items()))
    return tables


def answers(folder: pathlib.Path) -> list[list[float]]:
    """Returns a server's answers for IDS."""
    loaded = tf.saved_model.load(str(folder))
    (answer,) = loaded.signatures["serving_default"](item=tf.constant(IDS), user=tf.constant(IDS)).values()
    return answer.numpy().tolist()


def make(folder: pathlib.Path) -> None:
    """Writes all golden files.

    Raises:
      FileExistsError: the folder is there.
    """
    folder.mkdir()
    model, embedding = make_model()
    train(model, 0)
    saver = checkpoint.Checkpointer(folder / "checkpoint", model, model.optimizer, full_every=2, keep=1)
    saver.save({"step": 8})
    for ops in OPS:
        fr.export(model, folder / f"export-{ops}", ops)
    train(model, 8)
    for group in embedding.internals.groups:
        group.table.remove(group.table.names[0], np.array([1, 9]))
    saver.save({"step": 16})
    saver.wait()
    expected: dict[str, Any] = {"tables": state(embedding), "weights": weights(model)}
    for ops in OPS:
        fr.export(model, folder / f"delta-{ops}", ops, base=folder / f"export-{ops}")
        expected[f"export-{ops}"] = answers(folder / f"export-{ops}")
        fr.apply_delta(folder / f"export-{ops}", folder / f"delta-{ops}", folder / "applied")
        expected[f"delta-{ops}"] = answers(folder / "applied")
        shutil.rmtree(folder / "applied")
        (folder / f"delta-{ops}/apply_delta.py").replace(folder / "apply_delta.py")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def weights(model: keras.Model) -> list[Any]:
    """Returns the weights of the model and the optimizer, as numbers."""
    return [w.numpy().tolist() for w in [*model.layers[-1].weights, *model.optimizer.variables()]]


if __name__ == "__main__":
    target = FOLDER / fr.__version__
    try:
        make(target)
    except FileExistsError:
        sys.exit(f"error: {target} is there: golden files are never made anew. Remedy: raise the version first.")
    print(target)
