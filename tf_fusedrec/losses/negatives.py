"""Samples negatives for positions from the catalogue or the batch, and shares them between positions.

Positions belong to jagged histories, so no negative is drawn for padding. A draw is a pure function of its seed.
Source: TurboGR, section 4.3.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec._tf_compat import tf

SAMPLINGS = ("uniform", "frequency", "in_batch")
SHARINGS = ("negatives", "logits")


class Sampler:
    """Draws negatives, with replacement.

    "uniform" draws every item of the catalogue with equal probability. "frequency" draws an item by its share of the
    training interactions. "in_batch" draws the positive of a position of this batch, whose row is already looked up.

    Args:
      num_items: I >= 1, number of items in the catalogue. Negatives are indices into it.
      sampling: Distribution of the negatives, one of SAMPLINGS.
      counts: <int>[I], training interactions of each item. "uniform" does not need it. "in_batch" needs it for `log_q`
        only.

    Raises:
      ValueError: `sampling` is unknown, `counts` has another length, or "frequency" has no count above 0.
    """

    def __init__(self, num_items: int, sampling: str = "uniform", counts: np.ndarray | None = None):
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}.")
        if counts is not None and np.shape(counts) != (num_items,):
            raise ValueError(
                f"counts must hold one number for each of {num_items} items, got shape {np.shape(counts)}."
            )
        if sampling == "frequency" and (counts is None or not np.any(counts)):
            raise ValueError("sampling 'frequency' needs counts, some above 0. Take tf_fusedrec.data.read_items.")
        self.sampling = sampling
        self._num_items = num_items
        # Variables keep the counts of a catalogue with millions of items out of the graph.
        self._ends = self._log_q = None
        if counts is not None:
            counts = np.asarray(counts, np.int64)
            if sampling == "frequency":
                self._ends = tf.Variable(np.cumsum(counts), trainable=False)
            # log_q of an item without interactions must be finite: it is never drawn, but it may be a positive.
            self._log_q = tf.Variable(
                np.log(np.maximum(counts, 1) / max(counts.sum(), 1)).astype(np.float32), trainable=False
            )

    def draw(self, shape: tf.Tensor, seed: tf.Tensor, num_positions: tf.Tensor) -> tf.Tensor:
        """Draws negatives <int32>[shape], indices into the catalogue or, for "in_batch", positions of the batch.

        Args:
          shape: <int32>[any], for example [P, n] for n negatives per position.
          seed: <int>[2].
          num_positions: P, <int>[]. Only "in_batch" reads it.
        """
        if self._ends is not None:
            drawn = tf.random.stateless_uniform(shape, seed, maxval=self._ends[-1], dtype=tf.int64)
            indices = tf.searchsorted(self._ends, tf.reshape(drawn, [-1]), side="right", out_type=tf.int32)
            return tf.reshape(indices, shape)
        candidates = tf.maximum(num_positions, 1) if self.sampling == "in_batch" else self._num_items
        return tf.random.stateless_uniform(shape, seed, maxval=tf.cast(candidates, tf.int32), dtype=tf.int32)

    def log_q(self, items: tf.Tensor) -> tf.Tensor:
        """Returns the log probability <float32> of drawing the items with these catalogue indices <int>[...].

        The probability is the item's share of the training interactions. A batch is a sample of them, so it serves
        "in_batch" as well.

        Raises:
          ValueError: The sampler has no counts.
        """
        if self._log_q is None:
            raise ValueError("log_q needs counts. Take tf_fusedrec.data.read_items.")
        return tf.gather(self._log_q, items)


def other_positions(num_positions: tf.Tensor, columns: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns other positions of the batch for each position, <int32>[P, columns]. P = 1 gives the position itself.

    The function draws one random cycle through all positions and, for each column, a random number of steps along it.
    Every column holds each position exactly once, so all negatives are shared equally often.

    Args:
      num_positions: P, <int32>[].
      columns: Number of other positions for each position.
      seed: <int>[2].
    """
    cycle = tf.random.experimental.stateless_shuffle(tf.range(num_positions), seed)
    steps = tf.random.stateless_uniform([columns], seed + 1, minval=None, maxval=None, dtype=tf.int32)
    steps = 1 + tf.math.floormod(steps, tf.maximum(num_positions - 1, 1))
    reached = tf.math.floormod(tf.math.invert_permutation(cycle)[:, tf.newaxis] + steps, tf.maximum(num_positions, 1))
    return tf.gather(cycle, reached)


def reuse(values: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Returns values[source[p, c], c mod n], the values of other positions, for sharing negatives or logits.

    With rows or ids of negatives, position i gets further negatives n_k,j of positions k. The loss then computes its
    own logits o_i . n_k,j, as eq. 2 of the source says. With logits, position i gets o_k . n_k,j at no cost, as the
    source's text says. An expansion by k needs m = (k - 1) n, the source's R_aux.

    Args:
      values: [P, n].
      source: <int>[P, m], other positions; see other_positions.

    Returns:
      [P, m].
    """
    column = tf.math.floormod(tf.range(tf.shape(source)[1]), tf.maximum(tf.shape(values)[1], 1))
    column = tf.broadcast_to(column, tf.shape(source))
    return tf.gather_nd(values, tf.stack([tf.cast(source, tf.int32), column], axis=-1))
