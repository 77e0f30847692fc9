"""Answers of the ops whose CPU kernels are chosen by the processor, for test_masked_cpu.py.

`python kernel_answers.py F` writes them to F, and prints which package and kernels made them.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import tf_fusedrec as fr
from tf_fusedrec import ops, optimizers, tf
from tf_fusedrec.ops import _library

# Rules and storages: each has loops of its own. 19 columns leave a rest in every vector.
DIM = 19
TABLES = {
    "adagrad": (optimizers.Adagrad(0.1), None),
    "adam": (optimizers.Adam(0.1), "bfloat16"),
    "ftrl": (optimizers.Ftrl(0.1), None),
    "rowwise": (optimizers.RowWiseAdagrad(0.1), "float16"),
}


def trained_rows() -> dict[str, np.ndarray]:
    """Rows of all tables after three steps, and the last pooled rows."""
    tables = [
        fr.TableConfig(
            name, DIM, rule, fr.Normal(0.1), storage=fr.Storage(dtype=storage, stochastic_rounding=storage is not None)
        )
        for name, (rule, storage) in TABLES.items()
    ]
    embedding = fr.FusedEmbedding([fr.FeatureConfig(name, name, "mean") for name in TABLES], tables)
    generator = np.random.default_rng(0)
    ids = tf.RaggedTensor.from_row_lengths(generator.integers(0, 50, 300), [0, 100, 7, 193])
    for _ in range(3):
        with tf.GradientTape() as tape:
            pooled = embedding(dict.fromkeys(TABLES, ids))
            loss = tf.add_n([tf.reduce_sum(tf.sin(rows)) for rows in pooled.values()])
        tape.gradient(loss, embedding.trainable_variables)
    found = {f"pooled_{name}": rows.numpy() for name, rows in pooled.items()}
    for name in TABLES:
        row_ids, rows = embedding.export_table(name)[:2]
        found[f"rows_{name}"] = np.asarray(rows)[np.argsort(row_ids)]
    return found


def attention() -> dict[str, np.ndarray]:
    """Attention over short and long rows, and its gradients."""
    splits = tf.constant([0, 3, 3, 40, 260], tf.int64)
    values = np.random.default_rng(1).normal(size=[3, 260, 2, DIM]).astype(np.float32)
    tensors = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        answer = ops.jagged_attention(*tensors, splits, scale=1 / 260)
        loss = tf.reduce_sum(answer**2)
    parts = [answer, *tape.gradient(loss, tensors)]
    return {f"attention_{number}": part.numpy() for number, part in enumerate(parts)}


def answers() -> dict[str, np.ndarray]:
    return {**trained_rows(), **attention()}


if __name__ == "__main__":
    np.savez(sys.argv[1], **answers())
    print(json.dumps({"package": fr.__file__, "kernels": _library.cpu_kernels()}))
