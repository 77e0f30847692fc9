"""Rows of 16 bits: rounding to the nearest or stochastically, and memory. test_properties.py trains them.

Conversions are compared with NumPy's float16 and TensorFlow's bfloat16, pattern by pattern.
"""

import numpy as np
import pytest

from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": tf.bfloat16.as_numpy_dtype}


def rounded(values, storage):
    """Returns the nearest numbers of the storage, as float32. Numbers beyond the largest float16 become it."""
    if storage == "float16":
        values = np.clip(values, -65504, 65504)
    return np.asarray(values, np.float32).astype(NUMPY[storage]).astype(np.float32)


def every_pattern():
    """Returns all 16-bit patterns as [256, 256]."""
    return np.arange(65536, dtype=np.uint16).reshape(256, 256)


def with_rows(table, patterns):
    """Puts a row for each id 0, 1, ... into the table."""
    records = np.zeros(len(patterns), table.record_dtype())
    records["row"] = patterns
    table.restore(np.arange(len(patterns)), records)
    return [[list(range(len(patterns)))]]


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_every_pattern_is_read_for_what_it_is(storage):
    with new_table(dim=256, storage=storage) as table:
        patterns = every_pattern()
        values = patterns.view(NUMPY[storage])
        batch = with_rows(table, patterns.view(table.record_dtype()["row"].base))
        with np.errstate(all="ignore"):
            wide = values.astype(np.float32)
        np.testing.assert_array_equal(table.find(batch), wide)
        same = table.find(batch, tf.as_dtype(storage))
        np.testing.assert_array_equal(same.view(np.uint16), patterns)
        other = "bfloat16" if storage == "float16" else "float16"
        finite = np.isfinite(wide)
        got = table.find(batch, tf.as_dtype(other)).astype(np.float32)
        np.testing.assert_array_equal(got[finite], rounded(wide[finite], other))


INT8 = {"name": "t", "dim": 3, "storage.dtype": "int8", "unknown": "initial", "initializer.a": 1 / 3}


def read_int8(handle, ids, dtype=tf.float32):
    message = tf.constant([len(ids), *ids], tf.int64)
    return ops.table_read(handle, message, [len(message)], dim=3, dtype=dtype)[: len(ids)]


def test_rows_of_a_server_in_int8():
    """Every step, with an odd number of columns. An id without a row has a row in the dtype of training."""
    steps = np.arange(-128, 127, dtype=np.int8).reshape(85, 3)
    scales = np.random.default_rng(0).lognormal(size=[85, 1]).astype("<f4")
    records = np.concatenate([np.zeros([85, 16], np.uint8), steps.view(np.uint8), scales.view(np.uint8)], axis=1)
    for stored in NUMPY:
        handle = ops.hash_table(shared_name="", anonymous=True, tables=[INT8 | {"storage.initial_dtype": stored}])
        ops.table_import(handle, 0, np.arange(85, dtype=np.int64), records)
        rows = read_int8(handle, [*range(85), -1])
        np.testing.assert_array_equal(rows[:-1], steps.astype(np.float32) * scales)
        np.testing.assert_array_equal(rows[-1], rounded([1 / 3] * 3, stored))
        ids, handles = ops.table_keys(handle, 0)
        np.testing.assert_array_equal(ops.table_read_records(handle, handles)[:, 16:], records[ids.numpy(), 16:])


def test_nothing_trains_rows_in_int8():
    handle = ops.hash_table(shared_name="", anonymous=True, tables=[INT8])
    with pytest.raises(tf.errors.FailedPreconditionError, match="table 't' has rows in int8, which a server reads and"):
        ops.table_lookup(handle, [1, 5], [2], dim=3)
    with pytest.raises(tf.errors.FailedPreconditionError, match="table 't' has rows in int8"):
        ops.table_read_numbers(handle, [5], [0, 1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="T must be float for table 't', whose rows are in int8, got"
    ):
        read_int8(handle, [5], tf.bfloat16)
    assert "nothing trains rows in int8" in ops.check_tables([INT8 | {"averaged": True}])
    assert "is 'int8', which a GPU does not read" in ops.check_tables([INT8], "device")
    assert "Use 'int8', or leave it out" in ops.check_tables([{"dim": 3, "storage.initial_dtype": "float16"}])


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_every_pattern_survives_an_update_by_zero(storage):
    """Loads, updates and stores, like a training step. Subnormal bfloat16 is left out, because TensorFlow's threads
    treat subnormal float32 as zero.
    """
    with new_table(dim=256, storage=storage) as table:
        patterns = every_pattern()
        with np.errstate(all="ignore"):
            wide = np.abs(patterns.view(NUMPY[storage]).astype(np.float32))
        patterns[~np.isfinite(wide) | ((wide < 2.0**-126) & (wide > 0))] = 0
        batch = with_rows(table, patterns.view(table.record_dtype()["row"].base))
        table.train(batch, np.ones([256, 256], np.float32), learning_rate=0.0)
        np.testing.assert_array_equal(table.find(batch, tf.as_dtype(storage)).view(np.uint16), patterns)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_rows_are_answered_by_the_nearest(dtype):
    """Tests grid numbers, the middles between them, and their neighbours."""
    grid = np.arange(0x7BFF if dtype == "float16" else 0x7F7F, dtype=np.uint16)
    if dtype == "bfloat16":
        grid = grid[0x80:]  # no subnormal float32
    low, high = (part.view(NUMPY[dtype]).astype(np.float64) for part in (grid, grid + np.uint16(1)))
    middle = ((low + high) / 2).astype(np.float32)
    values = np.concatenate([low, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e38))])
    values = np.concatenate([values, -values, [65519, 65520, 1e6, -1e6]]).astype(np.float32)
    values = np.resize(values, [-(-len(values) // 256), 256])
    with new_table(dim=256) as table:
        got = table.find(with_rows(table, values), tf.as_dtype(dtype))
        np.testing.assert_array_equal(got.astype(np.float32), rounded(values, dtype))


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_new_rows_are_answered_as_they_are_stored(storage):
    """Both forms of the lookup return stored rows, also for ids that admission refuses."""
    with new_table(dim=8, storage=storage, admission_count=2) as table:
        want = rounded([table.initial((0, 3))], storage)
        np.testing.assert_array_equal(table.find([[[3]]]), want)
        for _ in range(3):
            np.testing.assert_array_equal(table.lookup([[[3]]]).rows[:1], want)


@pytest.mark.parametrize(("storage", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_stochastic_rounding_is_right_on_average(storage, bits):
    """Makes 400 steps of 1/32 of the grid's step at 1. Rounding to the nearest would never move the row."""
    steps, dim = 400, 1024
    for stochastic in (False, True):
        with new_table(
            dim=dim, storage=storage, stochastic_rounding=stochastic, distribution="constant", a=1.0
        ) as table:
            for step in range(1, steps + 1):
                table.train([[[1]]], np.full([1, dim], -(2.0 ** (-bits - 5)), np.float32), step=step)
            moved = (table.find([[[1]]]) - 1) * 2**bits  # in steps of the grid
            assert (moved == np.round(moved)).all()
            if not stochastic:
                assert not moved.any()
                continue
            # A column goes up in a step with probability 1/32: mean 12.5, deviation sqrt(400 * 31 / 32**2) = 3.5.
            assert abs(moved.mean() - steps / 32) < 5 * 3.5 / np.sqrt(dim)
            assert 2.5 < moved.std() < 4.5


def test_initial_rows_are_rounded_alike_whenever_they_come():
    """Stochastic rounding draws from the number, its column and the time. Initial rows ignore the time."""
    spec = {"dim": 16, "storage": "bfloat16", "stochastic_rounding": True}
    with new_table(max_rows=4, eviction="lru", **spec) as table, new_table(**spec) as other:
        first = table.lookup([[[1, 2, 3]]]).rows[:3]
        for n in range(10, 20):
            table.lookup([[[n, n + 1]]])
        assert not {1, 2, 3} & set(table.records()[0].tolist())
        other.lookup([[[9]]])
        for one in (table, other):
            np.testing.assert_array_equal(one.lookup([[[1, 2, 3]]]).rows[:3], first)


@pytest.mark.parametrize(("rule", "numbers", "slots"), [("rowwise_adagrad", 64, 4), ("adagrad", 128, 0)])
def test_an_all_cold_table_takes_at_most_55_percent(rule, numbers, slots):
    """Counts the mapped bytes of 131,072 more rows: header and payload, rounded up to the row's alignment."""
    rows, per_row = 1 << 17, []
    parameters = {"rowwise_adagrad": [0.0, 0.1, 1e-7, 0.0, 1.0, 1.0], "adagrad": [0.0, 0.1, 1e-7, 0.0, 0.0]}[rule]
    for hot_after, number_bytes in ((0, 4), (1 << 30, 2)):
        with new_table(
            dim=64, rule=rule, hyperparameters=parameters, distribution="constant", hot_after=hot_after
        ) as table:
            mapped = []
            for n in range(2):
                table.lookup([[list(range(n * rows, (n + 1) * rows))]])
                _, first, second, *counts = ops.table_statistics(table.handle).bytes.numpy().tolist()
                mapped.append(first + second)
            assert counts == ([0, 2 * rows] if hot_after else [2 * rows, 0])
        per_row.append((mapped[1] - mapped[0]) / rows)
        assert 0 <= per_row[-1] - (16 + number_bytes * numbers + slots) < 8  # row-wise slots are float32 in both
    assert per_row[1] <= 0.55 * per_row[0]
