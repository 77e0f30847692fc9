"""String ids as 64-bit integers, in the reader and in a served graph alike: TensorFlow's own tf.fingerprint.

The fingerprint is FarmHash's Fingerprint64 of the bytes, which its authors promise not to change. Two of n distinct
strings share one with a probability of about n^2 / 2^65:

    n            any collision      ids that share one, expected
    10^6         2.7e-8             5.4e-8
    10^8         2.7e-4             5.4e-4
    10^9         2.7 %              0.054
    10^10        93 %               5.4

Colliding ids share a row and train it together; nothing else breaks. Whose ids are chosen by adversaries should know
that Fingerprint64 is no cryptographic hash: collisions can be made.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tf_fusedrec._tf_compat import tf


def fingerprint(strings: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
    """<int64>[...] of <string>[...], of any shape. A stock TensorFlow op: a SavedModel with it needs no other library.

    Example: "" gives -7286425919675154353 (0x9ae16a3b2f90404f).
    """
    if isinstance(strings, tf.RaggedTensor):
        return strings.with_flat_values(fingerprint(strings.flat_values))
    flat = tf.reshape(strings, [-1])
    # One row of 8 bytes, little-endian, for each string.
    return tf.reshape(tf.bitcast(tf.fingerprint(flat), tf.int64), tf.shape(strings))


def fingerprint_arrow(array: pa.Array) -> np.ndarray:
    """<int64>[n] of an Arrow array of strings, plain or dictionary-encoded, without nulls."""
    # Each distinct string is hashed once.
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    # NumPy arrays of str would be copied at the width of the longest.
    distinct = np.array(encoded.dictionary.to_pylist(), object)
    if not len(distinct):
        return np.empty(0, np.int64)
    return fingerprint(tf.constant(distinct, tf.string)).numpy()[encoded.indices.to_numpy()]
