"""Which items a position is told apart from: sampling from the catalogue or the batch, and sharing between positions.

All of it is about positions of jagged histories: nothing is drawn for padding. Draws are pure functions of a seed.
Source: TurboGR, section 4.3.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec._tf_compat import tf

SAMPLINGS = ("uniform", "frequency", "in_batch")
SHARINGS = ("negatives", "logits")


class Sampler:
    """Draws negatives, with replacement.

    "uniform": every item of the catalogue is as likely. "frequency": an item by its share of the training
    interactions. "in_batch": the positive of a position of this batch, which brings no rows of its own.

    Args:
      num_items: I >= 1, items of the catalogue; they are named by their places in it.
      sampling: one of SAMPLINGS.
      counts: <int>[I], training interactions of each item; may be None for "uniform", and where only draws "in_batch"
        are wanted.

    Raises:
      ValueError: an unknown sampling; counts of another length; "frequency" without counts, or with none above 0.
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
        # Variables, not constants: a catalogue of millions has no place in a graph.
        self._ends = self._log_q = None
        if counts is not None:
            counts = np.asarray(counts, np.int64)
            if sampling == "frequency":
                self._ends = tf.Variable(np.cumsum(counts), trainable=False)
            # An item without interactions is as rare as one with one; it can be asked for, but never be drawn.
            self._log_q = tf.Variable(
                np.log(np.maximum(counts, 1) / max(counts.sum(), 1)).astype(np.float32), trainable=False
            )

    def draw(self, shape: tf.Tensor, seed: tf.Tensor, num_positions: tf.Tensor) -> tf.Tensor:
        """Negatives <int32>[shape]: places in the catalogue, or, "in_batch", positions of the batch.

        Args:
          shape: <int32>[any]; [P, n] for n negatives of each position.
          seed: <int>[2].
          num_positions: P, <int>[], read "in_batch" only.
        """
        if self._ends is not None:
            drawn = tf.random.stateless_uniform(shape, seed, maxval=self._ends[-1], dtype=tf.int64)
            places = tf.searchsorted(self._ends, tf.reshape(drawn, [-1]), side="right", out_type=tf.int32)
            return tf.reshape(places, shape)
        among = tf.maximum(num_positions, 1) if self.sampling == "in_batch" else self._num_items
        return tf.random.stateless_uniform(shape, seed, maxval=tf.cast(among, tf.int32), dtype=tf.int32)

    def log_q(self, places: tf.Tensor) -> tf.Tensor:
        """log of the probability to draw the items at these places <int>[...], by frequency or from a batch: <float32>.

        In a batch it is that of the training data, which the batch is a sample of.

        Raises:
          ValueError: no counts were given.
        """
        if self._log_q is None:
            raise ValueError("log_q needs counts. Take tf_fusedrec.data.read_items.")
        return tf.gather(self._log_q, places)


def other_positions(num_positions: tf.Tensor, columns: int, seed: tf.Tensor) -> tf.Tensor:
    """For each position other positions of the batch, <int32>[P, columns]; never itself, but where P is 1.

    The shuffle of tokens: one random cycle through all positions, and for each column a random number of steps along
    it. In every column each position occurs exactly once, so all negatives are shared equally often.

    Args:
      num_positions: P, <int32>[].
      columns: how many for each.
      seed: <int>[2].
    """
    cycle = tf.random.experimental.stateless_shuffle(tf.range(num_positions), seed)
    steps = tf.random.stateless_uniform([columns], seed + 1, minval=None, maxval=None, dtype=tf.int32)
    steps = 1 + tf.math.floormod(steps, tf.maximum(num_positions - 1, 1))
    reached = tf.math.floormod(tf.math.invert_permutation(cycle)[:, tf.newaxis] + steps, tf.maximum(num_positions, 1))
    return tf.gather(cycle, reached)


def reuse(values: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """values[source[p, c], c mod n]: what other positions have in their n columns, for logit sharing.

    Of negatives, as rows or ids: position i gets further negatives n_k,j of positions k, and the loss computes its own
    logits o_i . n_k,j (eq. 2 of the source as written). Of logits: it gets o_k . n_k,j, which cost nothing, as
    the source's text reads. R_aux = (k - 1) R further ones for an expansion by k.

    Args:
      values: [P, n].
      source: <int>[P, m], see other_positions.

    Returns:
      [P, m].
    """
    column = tf.math.floormod(tf.range(tf.shape(source)[1]), tf.maximum(tf.shape(values)[1], 1))
    column = tf.broadcast_to(column, tf.shape(source))
    return tf.gather_nd(values, tf.stack([tf.cast(source, tf.int32), column], axis=-1))
