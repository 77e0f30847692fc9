"""Fingerprints against FarmHash's published algorithm in Python, and string columns from file to batch."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.shards import read_lists
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.data import Column, ParquetFolder, fingerprint

MASK = 2**64 - 1
K0, K2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F


def _rotate(x, by):
    return (x >> by | x << (64 - by)) & MASK


def _hash16(u, v, mul):
    a = (u ^ v) * mul & MASK
    b = (v ^ a ^ a >> 47) * mul & MASK
    return (b ^ b >> 47) * mul & MASK


def farmhash64(data: bytes) -> int:
    """Fingerprint64 of at most 16 bytes (FarmHash, farmhashna::HashLen0to16), as int64."""
    n = len(data)

    def word(at, size):
        return int.from_bytes(data[at : at + size], "little")

    if n >= 8:
        mul = K2 + 2 * n
        a, b = (word(0, 8) + K2) & MASK, word(n - 8, 8)
        found = _hash16((_rotate(b, 37) * mul + a) & MASK, (_rotate(a, 25) + b) * mul & MASK, mul)
    elif n >= 4:
        found = _hash16(n + (word(0, 4) << 3), word(n - 4, 4), K2 + 2 * n)
    elif n:
        y, z = data[0] + (data[n >> 1] << 8), n + (data[-1] << 2)
        mixed = (y * K2 ^ z * K0) & MASK
        found = (mixed ^ mixed >> 47) * K2 & MASK
    else:
        found = K2
    return found - 2**64 if found >> 63 else found


STRINGS = ["", "a", "ab", "abc", "user", "item-17", "item-170", "0123456789abcdef", "\u00e9t\u00e9", "\0"]


def test_equals_farmhash():
    assert farmhash64(b"") == -7286425919675154353
    got = fingerprint(tf.reshape(tf.constant(STRINGS), [5, 2])).numpy()
    assert got.tolist() == np.reshape([farmhash64(text.encode()) for text in STRINGS], [5, 2]).tolist()


def test_ragged_empty_and_traced():
    ragged = tf.ragged.constant([["a", "bc"], [], ["a"]])
    got = tf.function(fingerprint)(ragged)
    assert got.to_list() == [[farmhash64(b"a"), farmhash64(b"bc")], [], [farmhash64(b"a")]]
    assert fingerprint(tf.zeros([0, 3], tf.string)).shape == [0, 3]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_string_columns_are_read_as_fingerprints(tmp_path, kind):
    lists = [["a", "bc"], [], ["", "a", "item-17"]]
    users = ["u1", "u2", "u1"]
    flat = pa.array(sum(lists, []), pa.string()).cast(kind)
    items = pa.ListArray.from_arrays(pa.array([0, 2, 2, 5], pa.int32()), flat)
    pq.write_table(pa.table({"user": pa.array(users).cast(kind), "item": items}), tmp_path / "a.parquet")
    folder = ParquetFolder(tmp_path, [Column("user", "string"), Column("item", "string", ragged=True, keep_last=2)])
    assert read_lists(folder) == [
        (farmhash64(user.encode()), tuple(farmhash64(item.encode()) for item in row[-2:]))
        for user, row in zip(users, lists)
    ]
    with pytest.raises(ValueError, match="a.parquet: column 'user' must be int64, got"):
        ParquetFolder(tmp_path, [Column("user")])
