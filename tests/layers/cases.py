"""Batches for all tests of this folder: rows of awkward lengths, weights, and oracle files."""

import json

import numpy as np

from tests.support.shared import shared_path
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.layers import sequence_times

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


def cuts(lengths, seed):
    """Returns ascending places of each row from 0 to its length, in random steps, some of them of no token."""
    random = np.random.default_rng(seed)
    between = [np.sort(random.integers(0, n + 1, 3)) for n in lengths]
    return [np.zeros_like(lengths), *np.transpose(between), np.array(lengths)]


def oracle_file(name):
    """Reads the arrays and settings of one file of independent reference results."""
    arrays = dict(np.load(shared_path(f"oracle/hstu/{name}.npz")))
    return arrays, json.loads(bytes(arrays.pop("meta_json")))


def reference_times(arrays):
    """Returns the times of a file's tokens, each of which asks at the time of the next one."""
    stamps = np.concatenate([arrays["timestamps"], arrays["timestamps"][:, -1:]], axis=1)
    splits = arrays["seq_offsets"]
    flat = (np.concatenate([row[at : at + n] for row, n in zip(stamps, np.diff(splits))]) for at in (0, 1))
    return sequence_times(*(tf.RaggedTensor.from_row_splits(of, splits) for of in flat))


def assert_equals_reference(call, inputs, variables, arrays, tolerance=None):
    """Output and gradients of call(inputs) equal the file's, in whose names `inputs` and `variables` are.

    tolerance: of gradients, relative to their largest entry; None: the noise in the file.
    """

    def as_ours(name, value):  # The file stores Linear weights as [out, in] and scalars as [1].
        return value.T if name.endswith("__weight") else np.reshape(value, variables.get(name, inputs.get(name)).shape)

    for name, variable in variables.items():
        variable.assign(as_ours(name, arrays[name]))
    inputs = {name: tf.constant(value) for name, value in inputs.items()}
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        out = call(*inputs.values())
        total = tf.reduce_sum(out * arrays["dout"])
    assert_within_noise(out, arrays["out"], arrays["noise_out"])
    for name, gradient in tape.gradient(total, {**inputs, **variables}).items():
        assert isinstance(gradient, tf.Tensor), f"the gradient of {name} is not dense"
        expected = as_ours(name, arrays[f"d_{name}"])
        if tolerance is None:
            assert_within_noise(gradient, expected, arrays[f"noise_d_{name}"])
        else:
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


def assert_within_noise(ours, expected, noise, factor=8.0):
    """`noise` is the error of a float32 reference implementation against the float64 one in the file.

    The factor covers another order of summation and the extreme of another rounding (seen: up to 2.1); one
    float32 rounding of the largest expected entry is allowed on top, since the file itself is rounded.
    """
    expected = np.asarray(expected, np.float64)
    error = np.max(np.abs(np.asarray(ours, np.float64) - expected), initial=0.0)
    limit = factor * float(noise) + 2.0**-23 * np.max(np.abs(expected), initial=0.0)
    assert error <= limit, f"max error {error:.3g} exceeds {limit:.3g} (noise {float(noise):.3g})"
