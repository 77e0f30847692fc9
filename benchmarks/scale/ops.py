"""The costs of our own ops per id or row on this machine, for the tables of our own step in benchmarks.scale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.synthetic import ZipfIds
from tf_fusedrec import ops, tf
from tf_fusedrec.tables import NativeTable


class OpCosts(NamedTuple):
    """Seconds per id or row, and the rate of a matrix product."""

    unique: float  # per id: segment_unique
    partition: float  # per unique id: rank_partition
    lookup: float  # per row at its owner: find, and copy to the answer
    update: float  # per row at its owner: sum over sources, optimizer
    recover: float  # per id: rows in the order of ids
    recover_grad: float  # per id: gradients summed by unique id
    flops_per_s: float


def measure(dim: int, ids: int, quick: bool) -> OpCosts:
    """Times every op on `ids` ids of a Zipf law over a million ids, with rows of `dim` columns."""
    drawn = ZipfIds(10**6, 0.8).draw(np.random.default_rng(0), (ids,))
    splits = tf.constant([0, ids], tf.int64)
    unique = ops.segment_unique(tf.constant(drawn), splits)
    harness.check_equal("segment_unique", tf.gather(unique.ids, unique.inverse), drawn)
    rows = int(tf.size(unique.ids))
    embedding = fr.FusedEmbedding(
        [fr.TableConfig(name="t", dim=dim, optimizer=fr.optimizers.Adagrad(0.01, 0.1))],
        [fr.FeatureConfig(name="f", table="t")],
        name="scale",
    )
    table = embedding.lookups[0].table
    assert isinstance(table, NativeTable)
    message = tf.concat([[tf.constant(rows, tf.int64)], unique.ids], 0)
    message_splits = tf.constant([rows + 1], tf.int32)
    found = table.lookup(message, message_splits, training=True)
    again = table.lookup(message, message_splits, training=True)
    harness.check_equal("rows of a second lookup", again.rows, found.rows)
    gradients = tf.random.stateless_normal([rows, dim], [1, 2])
    gathered = tf.gather(found.rows[:rows], unique.inverse)
    index = tf.cast(unique.inverse, tf.int32)
    side = 512
    square = tf.random.stateless_normal([side, side], [3, 4])

    def update() -> None:
        rows = table.lookup(message, message_splits, training=True)
        assert isinstance(rows, ops.TableRows)
        table.apply_gradients([(rows, gradients)], 1.0)

    variants = {
        "unique": lambda: ops.segment_unique(tf.constant(drawn), splits),
        "partition": lambda: ops.rank_partition(
            unique.ids, unique.splits, num_ranks=128, owner=table.owner, id_bits=table.id_bits, segment_names=["t"]
        ),
        "lookup": lambda: table.lookup(message, message_splits, training=True),
        "update": update,
        "recover": lambda: ops.recover(found.rows, index),
        "recover_grad": lambda: ops.recover_grad(gathered, index, tf.constant(rows, tf.int64)),
        "matmul": lambda: tf.linalg.matmul(square, square),
    }
    seconds = harness.measure(variants, warmup=3, repeats=5 if quick else 30)
    median = {name: timing.median_s for name, timing in seconds.items()}
    return OpCosts(
        unique=median["unique"] / ids,
        partition=median["partition"] / rows,
        lookup=median["lookup"] / rows,
        update=max(median["update"] - median["lookup"], 0.0) / rows,
        recover=median["recover"] / ids,
        recover_grad=median["recover_grad"] / ids,
        flops_per_s=2 * side**3 / median["matmul"],
    )
