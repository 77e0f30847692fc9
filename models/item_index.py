"""An inverted-file index of a catalogue: spherical k-means on the items' vectors, and the items of each cluster.

A search compares a user with all centroids, then with the items of the nearest lists (top_k.py). Plain NumPy, because
an export runs once, and no library that this project needs has k-means.
Source: Sivic and Zisserman, Video Google (ICCV 2003); Jegou et al., Product quantization (TPAMI 2011), section IV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tf_fusedrec import tf

_ROUNDS, _SAMPLE, _BLOCK = 12, 256, 8192  # passes of k-means, its vectors per list, vectors of one product


class IndexOptions(NamedTuple):
    """The index of an export."""

    share: float = 0.1  # products of a search over the products of a search through all items
    lists: int = 0  # clusters; 0: the square root of the number of items


class ItemIndex:
    """The lists of an index as variables, so that a delta replaces them like dense weights.

    Args:
      size: Items of the catalogue, N.
      dim: Columns of a vector, D.
      options: Number of lists and products.

    Raises:
      ValueError: An option is out of range, or leaves no product for items.
    """

    def __init__(self, size: int, dim: int, options: IndexOptions):
        self.lists = options.lists or max(1, round(size**0.5))
        self.products = int(options.share * size)
        if not (0 < options.share <= 1 and 1 <= self.lists < self.products):
            raise ValueError(
                f"an index of {size} items with share {options.share} and {self.lists} lists compares {self.products} "
                "vectors, which must be more than the lists and at most the items. Raise share, or lower lists."
            )
        self.centroids = tf.Variable(tf.zeros([self.lists, dim]), trainable=False, name="index_centroids")  # [C, D]
        # Positions of the items in the catalogue, list after list.
        self.order = tf.Variable(tf.zeros([size], tf.int64), trainable=False, name="index_order")
        self.splits = tf.Variable(tf.zeros([self.lists + 1], tf.int64), trainable=False, name="index_splits")

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        return self.centroids, self.order, self.splits

    def build(self, vectors: np.ndarray) -> None:
        """Clusters the unit vectors <float32>[N, D]. Equal vectors give equal lists."""
        centroids = _centroids(vectors, self.lists)
        nearest, _ = _nearest(vectors, centroids)
        self.centroids.assign(centroids)
        self.order.assign(np.argsort(nearest, kind="stable"))
        self.splits.assign(np.concatenate([[0], np.cumsum(np.bincount(nearest, minlength=self.lists))]))


def _centroids(vectors: np.ndarray, lists: int) -> np.ndarray:
    """Unit centroids <float32>[lists, D] of spherical k-means on a sample."""
    random = np.random.default_rng(0)
    sample = vectors[random.permutation(len(vectors))[: _SAMPLE * lists]]
    centroids = sample[:lists]  # The sample is in random order.
    for _ in range(_ROUNDS):
        nearest, similarity = _nearest(sample, centroids)
        sums = np.stack([np.bincount(nearest, column, lists) for column in sample.T], axis=1)
        empty = np.flatnonzero(np.bincount(nearest, minlength=lists) == 0)
        sums[empty] = sample[np.argsort(similarity)[: len(empty)]]  # the vectors that fit their lists least
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = (sums / np.maximum(lengths, 1e-12)).astype(np.float32)
    return centroids


def _nearest(vectors: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each vector, and the product of both."""
    nearest, similarity = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    for begin in range(0, len(vectors), _BLOCK):
        products = vectors[begin : begin + _BLOCK] @ centroids.T
        best = products.argmax(axis=1)
        nearest[begin : begin + _BLOCK], similarity[begin : begin + _BLOCK] = best, products[np.arange(len(best)), best]
    return nearest, similarity
