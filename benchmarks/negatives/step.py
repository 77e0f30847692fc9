"""One training step with sampled negatives, in a plain form and in ours, and its peak memory.

The plain form gathers a row for every negative of every position. Automatic differentiation keeps this [P, n, D].
Our form looks up each item once and computes logits in segments. The gradient computes the logits again.
"""

from __future__ import annotations

import pathlib

import numpy as np

from benchmarks.harness import children
from benchmarks.harness.memory import kilobytes
from tf_fusedrec import losses, tf

DIM = 64
ITEMS = 200_000
TEMPERATURE = 0.05
# oneDNN's memory pool keeps far more memory than is in use. Without the pool, and with freed blocks returned to the
# system at once, the resident memory is the memory in use.
RETURN_MEMORY = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


class Case:
    """Positions of one batch, their positives and drawn negatives, and the table of their rows."""

    def __init__(self, positions: int, negatives: int, items: int = ITEMS):
        generator = np.random.default_rng(7)
        self.table = tf.Variable(generator.normal(size=(items, DIM)).astype(np.float32))
        self.query = tf.Variable(generator.normal(size=(positions, DIM)).astype(np.float32))
        self.positives = tf.constant(generator.integers(0, items, positions), tf.int64)
        self.negatives = tf.constant(generator.integers(0, items, (positions, negatives)), tf.int64)

    def plain(self, row_dtype: str) -> tf.Tensor:
        """Returns the mean loss of the plain form."""
        rows = tf.cast(tf.cast(tf.gather(self.table, self.negatives), row_dtype), tf.float32)
        positive = tf.gather(self.table, self.positives)
        query, positive, rows = (tf.math.l2_normalize(vectors, axis=-1) for vectors in (self.query, positive, rows))
        own = tf.reduce_sum(query * positive, axis=-1, keepdims=True) / TEMPERATURE
        others = tf.einsum("pd,pnd->pn", query, rows) / TEMPERATURE
        others = tf.where(self.negatives == self.positives[:, tf.newaxis], losses.COLLISION_LOGIT, others)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(_first(others), tf.concat([own, others], axis=1)))

    def ours(self, row_dtype: str) -> tf.Tensor:
        """Returns the mean loss of losses.sampled_softmax."""
        items, chosen = tf.unique(tf.reshape(self.negatives, [-1]))
        rows = _narrowed(tf.gather(self.table, items), row_dtype)
        positive, chosen = tf.gather(self.table, self.positives), tf.reshape(chosen, tf.shape(self.negatives))
        nll = losses.sampled_softmax(self.query, positive, rows, self.positives, items, TEMPERATURE, chosen=chosen)
        return tf.reduce_mean(nll)

    def step(self, form: str, row_dtype: str = "float32") -> tf.types.experimental.GenericFunction:
        """Returns a function without arguments: loss, gradients of queries and of table rows (with repeated ids)."""
        loss_of = {"plain": self.plain, "ours": self.ours}[form]

        @tf.function(autograph=False)
        def run() -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of(row_dtype)
            d_query, d_table = tape.gradient(loss, [self.query, self.table])
            return [loss, d_query, d_table.values, d_table.indices]

        return run


def _first(others: tf.Tensor) -> tf.Tensor:
    """Returns labels with all weight on the positive, which comes first."""
    zeros = tf.zeros_like(others)
    return tf.concat([tf.ones_like(zeros[:, :1]), zeros], axis=1)


def _narrowed(rows: tf.Tensor, dtype: str) -> tf.Tensor:
    """Casts rows as an embedding layer does. The gradient is cast back and is otherwise unchanged."""

    @tf.custom_gradient
    def narrowed(rows: tf.Tensor):
        return tf.cast(rows, dtype), lambda upstream: tf.cast(upstream, rows.dtype)

    return narrowed(rows)


def main(form: str, positions: int, negatives: int, row_dtype: str) -> float:
    """Returns the bytes that the second step, forward and backward, adds at its peak.

    The first step traces, starts threads and loads code. The process needs RETURN_MEMORY in its environment. Otherwise
    memory that the first step has freed counts as held before the second one.
    """
    step = Case(positions, negatives).step(form, row_dtype)
    step()
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins here
    before = kilobytes("VmRSS")
    step()
    return 1024.0 * (kilobytes("VmHWM") - before)


if __name__ == "__main__":
    children.answer(main)
