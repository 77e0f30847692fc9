"""Batches for all tests of this folder: rows of awkward lengths, weights, and oracle files."""

import json

import numpy as np

from tests.support.shared import shared_path
from tf_fusedrec._tf_compat import tf

ROW_LENGTHS = {
    "mixed": [7, 24, 1, 0, 13],
    "empty_first_and_last": [0, 3, 0],
    "one_row": [5],
    "all_rows_empty": [0, 0, 0],
    "no_rows": [],
}


def splits_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def tokens(lengths, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(sum(lengths), *shape)).astype(np.float32)


def times(lengths, seed=0):
    """Returns ascending seconds inside each row."""
    generator = np.random.default_rng(seed)
    rows = [np.sort(generator.integers(978_300_000, 1_046_454_590, n)) for n in lengths]
    return np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)


def ragged(lengths, *shape, seed=0):
    return tf.RaggedTensor.from_row_splits(tokens(lengths, *shape, seed=seed), splits_of(lengths))


def batch(lengths):
    """Returns tokens of 8 columns and their times."""
    return ragged(lengths, 8), tf.RaggedTensor.from_row_splits(times(lengths), splits_of(lengths))


def rows_of(flat, lengths):
    return np.split(np.asarray(flat), splits_of(lengths)[1:-1]) if len(lengths) else []


def oracle_file(name):
    """Reads the arrays and settings of one file of independent reference results."""
    arrays = dict(np.load(shared_path(f"oracle/hstu/{name}.npz")))
    return arrays, json.loads(bytes(arrays.pop("meta_json")))


def assert_within_noise(ours, expected, noise, factor=8.0):
    """`noise` is the error of a float32 reference implementation against the float64 one in the file.

    The factor covers another order of summation and the extreme of another rounding (seen: up to 2.1); one
    float32 rounding of the largest expected entry is allowed on top, since the file itself is rounded.
    """
    expected = np.asarray(expected, np.float64)
    error = np.max(np.abs(np.asarray(ours, np.float64) - expected), initial=0.0)
    limit = factor * float(noise) + 2.0**-23 * np.max(np.abs(expected), initial=0.0)
    assert error <= limit, f"max error {error:.3g} exceeds {limit:.3g} (noise {float(noise):.3g})"
