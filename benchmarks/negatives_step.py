"""One training step over sampled negatives, plain and ours; and its peak memory, in a process of its own.

The plain form looks up a row for every negative of every position: [P, n, D], which automatic differentiation keeps.
Ours looks up each item once and computes logits in segments, which the gradient computes again.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np

from benchmarks import children
from tf_fusedrec import losses, tf

DIM = 64
ITEMS = 200_000
TEMPERATURE = 0.05
# The pool that TensorFlow takes from oneDNN keeps, and spreads over, far more than is in use; by its absence, and with
# blocks given back to the system when they are freed, what is resident is what is in use.
RETURN_MEMORY = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


class Case:
    """Positions of one batch, their positives and drawn negatives, and the table they are rows of."""

    def __init__(self, positions: int, negatives: int, items: int = ITEMS):
        generator = np.random.default_rng(7)
        self.table = tf.Variable(generator.normal(size=(items, DIM)).astype(np.float32))
        self.query = tf.Variable(generator.normal(size=(positions, DIM)).astype(np.float32))
        self.positives = tf.constant(generator.integers(0, items, positions), tf.int64)
        self.negatives = tf.constant(generator.integers(0, items, (positions, negatives)), tf.int64)

    def plain(self, row_dtype: str) -> tf.Tensor:
        """Mean loss of the form that gathers a row for every negative."""
        rows = tf.cast(tf.cast(tf.gather(self.table, self.negatives), row_dtype), tf.float32)
        positive = tf.gather(self.table, self.positives)
        query, positive, rows = (tf.math.l2_normalize(vectors, axis=-1) for vectors in (self.query, positive, rows))
        own = tf.reduce_sum(query * positive, axis=-1, keepdims=True) / TEMPERATURE
        others = tf.einsum("pd,pnd->pn", query, rows) / TEMPERATURE
        others = tf.where(self.negatives == self.positives[:, tf.newaxis], losses.COLLISION_LOGIT, others)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(_first(others), tf.concat([own, others], axis=1)))

    def ours(self, row_dtype: str) -> tf.Tensor:
        """The same of losses.sampled_softmax."""
        items, chosen = tf.unique(tf.reshape(self.negatives, [-1]))
        rows = _narrowed(tf.gather(self.table, items), row_dtype)
        positive, chosen = tf.gather(self.table, self.positives), tf.reshape(chosen, tf.shape(self.negatives))
        nll = losses.sampled_softmax(self.query, positive, rows, self.positives, items, TEMPERATURE, chosen=chosen)
        return tf.reduce_mean(nll)

    def step(self, form: str, row_dtype: str = "float32") -> tf.types.experimental.GenericFunction:
        """A function of nothing: loss, gradients of the queries and of the table's rows (slices, ids with repeats)."""
        loss_of = {"plain": self.plain, "ours": self.ours}[form]

        @tf.function(autograph=False)
        def run() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of(row_dtype)
            of_query, of_table = tape.gradient(loss, [self.query, self.table])
            return [loss, of_query, of_table.values, of_table.indices]

        return run


def _first(others: tf.Tensor) -> tf.Tensor:
    """Labels: all weight on the positive, which stands first."""
    zeros = tf.zeros_like(others)
    return tf.concat([tf.ones_like(zeros[:, :1]), zeros], axis=1)


def _narrowed(rows: tf.Tensor, dtype: str) -> tf.Tensor:
    """Rows as an embedding layer hands them on in that type; the gradient goes back as it comes."""

    @tf.custom_gradient
    def narrowed(rows: tf.Tensor):
        return tf.cast(rows, dtype), lambda upstream: tf.cast(upstream, rows.dtype)

    return narrowed(rows)


def _kilobytes(field: str) -> int:
    found = re.search(
        rf"^{field}:\s+(\d+) kB$", pathlib.Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found.group(1)) if found else 0


def main(form: str, positions: int, negatives: int, row_dtype: str) -> float:
    """Bytes by which a step, forward and backward, rises above what the process held before; its second step.

    The first traces, starts threads and loads code. Run it with RETURN_MEMORY, or what the first step has freed counts
    as held before the second.
    """
    step = Case(positions, negatives).step(form, row_dtype)
    step()
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins here
    before = _kilobytes("VmRSS")
    step()
    return 1024.0 * (_kilobytes("VmHWM") - before)


if __name__ == "__main__":
    children.answer(main)
