"""Fingerprints against FarmHash's published algorithm in Python, and string columns from file to batch."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tf_fusedrec as fr
from tests.data.shards import read_lists
from tf_fusedrec import keras, tf
from tf_fusedrec.data import Column, ParquetFolder

MASK = 2**64 - 1
K0, K2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F


def _rotate(x, by):
    return (x >> by | x << (64 - by)) & MASK


def _hash16(u, v, mul):
    a = (u ^ v) * mul & MASK
    b = (v ^ a ^ a >> 47) * mul & MASK
    return (b ^ b >> 47) * mul & MASK


def farmhash64(data: bytes) -> int:
    """Returns Fingerprint64 of at most 16 bytes (FarmHash, farmhashna::HashLen0to16), as int64."""
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


def of_python(strings):
    return [farmhash64(text.encode()) for text in strings]


@pytest.mark.parametrize(
    "make",
    [
        lambda strings: strings,
        lambda strings: [text.encode() for text in strings],
        lambda strings: np.array(strings, object),
        pa.array,
        lambda strings: pa.array(strings).dictionary_encode(),
        lambda strings: pa.chunked_array([strings[:3], strings[3:]]),
    ],
)
def test_strings_of_every_kind_have_the_ids_of_farmhash(make):
    assert farmhash64(b"") == -7286425919675154353
    got = fr.hash_strings(make(STRINGS))
    assert got.dtype == np.int64 and got.tolist() == of_python(STRINGS)


def test_tensors_of_every_form_keep_it():
    assert int(fr.hash_strings("")) == farmhash64(b"")
    for nothing in ([], pa.array([], pa.string()), np.array([], "U3")):
        assert fr.hash_strings(nothing).shape == (0,)
    assert fr.hash_strings(tf.zeros([0, 3], tf.string)).shape == [0, 3]
    pairs = [STRINGS[at : at + 2] for at in range(0, 10, 2)]
    for given in (pairs, tf.constant(pairs)):
        assert np.asarray(fr.hash_strings(given)).tolist() == [of_python(pair) for pair in pairs]
    ragged = tf.function(fr.hash_strings)(tf.ragged.constant([["a", "bc"], [], ["a"]]))
    assert ragged.to_list() == [of_python(["a", "bc"]), [], of_python(["a"])]
    sparse = tf.SparseTensor([[0, 1], [1, 0]], ["a", "bc"], [2, 2])
    hashed = fr.hash_strings(sparse)
    assert hashed.values.numpy().tolist() == of_python(["a", "bc"]) and hashed.indices is sparse.indices
    dataset = tf.data.Dataset.from_tensor_slices(STRINGS).batch(5).map(fr.hash_strings)
    assert dataset.element_spec == tf.TensorSpec([None], tf.int64)
    assert [i for part in dataset for i in part.numpy()] == of_python(STRINGS)


def test_integers_stay_themselves_in_a_graph():
    texts = [["12", "12.0", "-9223372036854775808"], ["007", "9223372036854775808", ""]]
    wanted = [[12, 12, -(2**63)], [*map(int, fr.hash_strings(texts[1][:2])), -1]]
    symbol = keras.Input([3], dtype=tf.string)
    model = keras.Model(symbol, fr.hash_strings(symbol, integers=True))
    assert model(tf.constant(texts)).numpy().tolist() == wanted


@pytest.mark.parametrize(
    ("strings", "words"),
    [
        (["a", None], "must be str or bytes, got None at 1. Use '' for missing values"),
        ([["a"], [float("nan")]], r"must be str or bytes, got nan at \(1, 0\)"),
        ([["a"], ["b", "c"]], r"must be str or bytes, got \['a'\] at 0"),
        (pa.array(["a", None]), "must be str or bytes, got null at 1"),
        (pa.array([["a"]]), "must be an Arrow array of strings, got list<item: string>. Hash the flat values"),
        (np.arange(2), "must be str or bytes, got 0 at 0"),
        (lambda: tf.range(2), "must have dtype string, got int32. Integers are ids as they are"),
    ],
)
def test_other_values_than_strings_are_refused(strings, words):
    with pytest.raises(ValueError, match=words):
        fr.hash_strings(strings() if callable(strings) else strings)


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
