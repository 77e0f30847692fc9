"""Compares exports with rows of fewer bytes: bytes and AUC of a trained model of users and items."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import keras, tf
from tf_fusedrec.metrics import exact
from tf_fusedrec.saved_model import applying

FORMS = (None, "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Clicks:
    """A task with hidden factors of users and items."""

    users: int = 2000
    items: int = 2000
    dim: int = 64
    samples: int = 400_000  # of an epoch
    held_out: int = 200_000
    epochs: int = 2


def row_fields(folder: pathlib.Path, size: Clicks) -> dict[str, float]:
    """Returns int8_bytes_ratio (rows with their scales over float32 rows), and the differences of AUC.

    The AUC covers the held-out samples. Most of their users and items occur in training.
    """
    random = np.random.default_rng(0)
    hidden = [random.normal(0, 1, [count, 8]) for count in (size.users, size.items)]

    def draw(samples: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ids = {"user": random.integers(0, size.users, samples), "item": random.integers(0, size.items, samples)}
        logits = (hidden[0][ids["user"]] * hidden[1][ids["item"]]).sum(axis=1)
        return ids, (random.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)

    model = _model(size.dim)
    model.fit(*draw(size.samples), batch_size=1024, epochs=size.epochs, verbose=0)
    asked, labels = draw(size.held_out)
    auc, size_of_rows = {}, {}
    for form in FORMS:
        path = folder / f"rows-{form}"
        fr.export(model, path, rows=form)
        answers = tf.saved_model.load(str(path)).signatures["serving_default"](**asked)
        auc[form] = exact.auc(labels, answers["click"].numpy()[:, 0])
        size_of_rows[form] = sum(rows.nbytes for _, rows in applying.read_tables(path).values())
    return {
        "auc": auc[None],
        "auc_difference_int8": abs(auc["int8"] - auc[None]),
        "auc_difference_bfloat16": abs(auc["bfloat16"] - auc[None]),
        "int8_bytes_ratio": size_of_rows["int8"] / size_of_rows[None],
    }


def _model(dim: int) -> keras.Model:
    rule = fr.optimizers.Adam(0.003)
    embedding = fr.FusedEmbedding(
        [fr.TableConfig(name, dim, rule, fr.Normal(0.0, 0.05)) for name in ("user", "item")],
        [fr.FeatureConfig(name, name) for name in ("user", "item")],
    )
    inputs = {name: keras.Input([], dtype=tf.int64, name=name) for name in ("user", "item")}
    rows = embedding(inputs)
    product = keras.layers.Dense(1, "sigmoid", name="click")(rows["user"] * rows["item"])
    model = keras.Model(inputs, product)
    model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy")
    return model
