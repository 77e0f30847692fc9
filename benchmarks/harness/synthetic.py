"""Ids as in recommendation logs, few hot and most rare. They are a pure function of the seed. Needs NumPy alone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_ID_BITS = 40  # fits every key encoding, and the low bits still look random


class Batch(NamedTuple):
    """One rank's batch of one step."""

    ids: np.ndarray  # <int64>[F, B, L]
    labels: np.ndarray  # <float32>[B]


def id_of(order: np.ndarray) -> np.ndarray:
    """Returns <int64>[shape] ids in [0, 2^40) by their places in the order of frequency. It is one-to-one."""
    scattered = np.asarray(order).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (scattered >> np.uint64(64 - _ID_BITS)).astype(np.int64)


class ZipfIds:
    """Draws ids of one feature. The k-th most frequent of `vocabulary` ids has a probability ~ k^-alpha."""

    def __init__(self, vocabulary: int, alpha: float):
        weights = np.arange(1, vocabulary + 1, dtype=np.float64) ** -alpha
        self._cumulative = np.cumsum(weights) / np.sum(weights)

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Returns <int64>[shape] ids in [0, 2^40)."""
        return id_of(np.searchsorted(self._cumulative, random.random(shape)))


class Batches:
    """Batches of a click model. The vocabularies of its features have from 10^3 to 10^6 ids."""

    def __init__(self, *, features: int, batch_size: int, ids_per_feature: int, alpha: float):
        self._shape = (batch_size, ids_per_feature)
        self._features = [ZipfIds(int(v), alpha) for v in np.geomspace(1e3, 1e6, features)]

    def batch(self, step: int, rank: int) -> Batch:
        """Returns the batch of one step on one rank. Labels depend on the ids, so that a model can learn."""
        random = np.random.default_rng((step, rank))
        ids = np.stack([feature.draw(random, self._shape) for feature in self._features])
        votes = np.where((ids >> 7) & 1, 1.0, -1.0).mean(axis=(0, 2))
        return Batch(ids, (votes > 0).astype(np.float32))


def segment_ids(seed: int, *, n_ids: int, zipf_alpha: float, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids <int64>[n_ids], out of 10^6, and the splits <int64>[segments + 1] of equally long segments."""
    random = np.random.default_rng(seed)
    ids = ZipfIds(10**6, zipf_alpha).draw(random, (n_ids,))
    return ids, np.linspace(0, n_ids, segments + 1).astype(np.int64)


def repeated(batches: Sequence[Any], change: Callable[[Any], Any] | None = None) -> Any:
    """Returns a tf.data.Dataset that repeats the batches for ever, after `change` of their dataset."""
    from tf_fusedrec import tf

    whole = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        whole = whole.concatenate(tf.data.Dataset.from_tensors(batch))
    options = tf.data.Options()
    # An iterator with a tuner ends only when the tuner next wakes, up to a minute later.
    options.autotune.enabled = False
    return (change(whole) if change else whole).cache().repeat().with_options(options)
