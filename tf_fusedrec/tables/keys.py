"""Makes one key of (table, id), for TFRA's variables, which know a single key.

The owner makes keys after the exchange (deferred hashing, FusedRec section 3, "Lossless Lookup").

- MergedBits (MTGRBoost eq. 8): key = (table number << (63 - k)) | id with k = ceil(log2(m + 1)) bits for m tables.
  It is exact and reversible. Ids must lie in [0, 2^(63 - k)). A group of one table needs no bits: its key is the id.
- NameHash: key = Mix64(id xor h(name)) for any id. Two pairs (name, id) share a key with probability 2^-64. So n rows
  have a collision with probability about n^2 / 2^65: 3e-8 for a million rows, 3 % for a billion. A reverse map from
  keys to (table, id) lies beside the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.files.hash_order import table_seed

KEY_ENCODINGS = ("bits", "hash")


class MergedBits:
    """Keys of MTGRBoost eq. 8."""

    def __init__(self, names: Sequence[str]):
        table_bits = math.ceil(math.log2(len(names) + 1)) if len(names) > 1 else 0
        self._shift = 63 - table_bits
        self.id_bits = self._shift if len(names) > 1 else 64

    def encode(self, ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """<int64>[W] keys of ids <int64>[W] in tables <int64>[W]. The sender of the ids has checked their range."""
        if self.id_bits == 64:
            return ids
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(segments, tf.cast(self._shift, tf.int64)), ids)

    def decode_tensor(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """ids and table numbers, both <int64>[W], of keys <int64>[W]."""
        if self.id_bits == 64:
            return keys, tf.zeros_like(keys)
        mask, shift = tf.constant((1 << self._shift) - 1, tf.int64), tf.constant(self._shift, tf.int64)
        return tf.bitwise.bitwise_and(keys, mask), tf.bitwise.right_shift(keys, shift)

    def decode(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids and table numbers, both <int64>, of NumPy keys."""
        if self.id_bits == 64:
            return keys, np.zeros_like(keys)
        return keys & ((np.int64(1) << self._shift) - 1), keys >> self._shift


class NameHash:
    """Keys from a 64-bit hash of the table's name and the id."""

    id_bits = 64

    def __init__(self, names: Sequence[str]):
        self._salts = tf.constant([table_seed(0, name) for name in names], tf.int64)

    def encode(self, ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """<int64>[W] keys of ids <int64>[W] in tables <int64>[W]."""
        salted = tf.bitwise.bitwise_xor(ids, tf.gather(self._salts, segments))
        return tf.bitcast(mix64(tf.bitcast(salted, tf.uint64)), tf.int64)


def mix64(x: tf.Tensor) -> tf.Tensor:
    """MurmurHash3's 64-bit finalizer on <uint64>, as in custom_ops/common/hash.h."""
    shift = tf.constant(33, tf.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, shift)) * tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, shift))


def make_encoding(kind: str, names: Sequence[str]) -> MergedBits | NameHash:
    """The key encoding called `kind` ("bits" or "hash") for tables `names`."""
    if kind not in KEY_ENCODINGS:
        raise ValueError(f"key_encoding must be one of {KEY_ENCODINGS}, got {kind!r}.")
    return MergedBits(names) if kind == "bits" else NameHash(names)
