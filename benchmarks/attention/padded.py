"""Attention over padded rows in plain TensorFlow, as fast as we can write it: the peer of the jagged op.

The peers get padded tokens [B, H, n, d] and the buckets of all pairs. The time of this preparation is not measured.
The backward pass computes the scores again, as ours does. It makes the fewest passes over [B, H, n, n] that
TensorFlow's ops allow, and XLA fuses them further. A peer computes a few rows at a time, which costs no time and limits
its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import tf


class Weights(NamedTuple):
    """The bias of the research HSTU."""

    position: tf.Tensor  # <float32>[2N-1]
    time: tf.Tensor  # <float32>[G+1]


class Rows(NamedTuple):
    """Padded rows: queries, keys, values and the gradient of the output <float32>[B, H, n, d]; buckets [B, n, n]."""

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    grads: tf.Tensor
    buckets: tf.Tensor


def _causal(length: tf.Tensor) -> tf.Tensor:
    return tf.linalg.band_part(tf.ones([length, length]), -1, 0)


def _scores(rows: Rows, weights: Weights | None) -> tf.Tensor:
    scores = tf.matmul(rows.query, rows.key, transpose_b=True)
    if weights is None:
        return scores
    return scores + (_position_bias(weights, tf.shape(scores)[-1]) + tf.gather(weights.time, rows.buckets))[:, None]


def _distance(weights: Weights, length: tf.Tensor) -> tf.Tensor:
    places = tf.range(length)
    return tf.shape(weights.position)[0] // 2 + places[None, :] - places[:, None]


def _position_bias(weights: Weights, length: tf.Tensor) -> tf.Tensor:
    return tf.gather(weights.position, _distance(weights, length))


def forward(rows: Rows, weights: Weights | None, scale: float) -> tf.Tensor:
    """Returns the output [B, H, n, d]."""
    scores = _scores(rows, weights)
    return tf.matmul(tf.nn.silu(scores) * _causal(tf.shape(scores)[-1]), rows.value) * scale


def backward(rows: Rows, weights: Weights | None, scale: float) -> list[tf.Tensor]:
    """Returns the gradients of query, key, value and the weights of the bias."""
    scores = _scores(rows, weights)
    length = tf.shape(scores)[-1]
    grads = rows.grads * scale
    sigmoid = tf.sigmoid(scores)
    visible_sigmoid = sigmoid * _causal(length)
    seen = scores * visible_sigmoid
    d_scores = tf.matmul(grads, rows.value, transpose_b=True) * (visible_sigmoid + seen * (1.0 - sigmoid))
    found = [
        tf.matmul(d_scores, rows.key),
        tf.matmul(d_scores, rows.query, transpose_a=True),
        tf.matmul(seen, grads, transpose_a=True),
    ]
    if weights is None:
        return found
    d_bias = tf.reduce_sum(d_scores, axis=1)
    by_distance = tf.reduce_sum(d_bias, axis=0)
    d_position = tf.math.unsorted_segment_sum(by_distance, _distance(weights, length), tf.shape(weights.position)[0])
    d_time = tf.math.unsorted_segment_sum(d_bias, rows.buckets, tf.shape(weights.time)[0])
    return [*found, d_position, d_time]


class Peer:
    """Runs padded batches one after another, and sums the gradients of the weights."""

    def __init__(self, batches: Sequence[Rows], weights: Weights | None, scale: float, xla: bool):
        def compiled(function: Callable[..., Any], rows: Rows) -> Callable[[], Any]:
            return tf.function(lambda: function(rows, weights, scale), jit_compile=xla)

        # Each batch has a graph of its own, in which TensorFlow knows all shapes.
        self._forward = [compiled(forward, rows) for rows in batches]
        self._backward = [compiled(backward, rows) for rows in batches]

    def forward(self) -> list[tf.Tensor]:
        """Returns one output per batch."""
        return [call() for call in self._forward]

    def both(self) -> tuple[list[tf.Tensor], list[list[tf.Tensor]], list[tf.Tensor]]:
        """Returns outputs, gradients of query, key and value, and the summed gradients of the weights."""
        outs, tokens, weights = [], [], []
        for forward_call, backward_call in zip(self._forward, self._backward):
            outs.append(forward_call())
            found = backward_call()
            tokens.append(found[:3])
            weights.append(found[3:])
        return outs, tokens, [tf.add_n(parts) for parts in zip(*weights)]


def padded(arrays: Sequence[np.ndarray], splits: np.ndarray, rows: Sequence[int], length: int) -> list[np.ndarray]:
    """Returns arrays [len(rows), H, length, d] of the given rows, from arrays [T, H, d]."""
    found = []
    for array in arrays:
        out = np.zeros((len(rows), array.shape[1], length, array.shape[2]), np.float32)
        for place, row in enumerate(rows):
            tokens = array[splits[row] : splits[row + 1]]
            out[place, :, : len(tokens)] = tokens.transpose(1, 0, 2)
        found.append(out)
    return found


def groups_of(lengths: np.ndarray, edges: Sequence[int], most: int) -> list[list[int]]:
    """Returns groups of rows. A group's lengths lie between two edges, and its padded pairs are at most `most`."""
    groups = []
    for low, high in zip([0, *edges[:-1]], edges):
        inside = [row for row in np.argsort(lengths, kind="stable") if low < lengths[row] <= high]
        size = max(1, most // max([1, *(int(lengths[row]) ** 2 for row in inside)]))
        groups += [inside[begin : begin + size] for begin in range(0, len(inside), size)]
    return groups
