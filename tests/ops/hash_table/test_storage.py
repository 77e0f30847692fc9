"""Storage of rows: 16 bits, rounded to the nearest or stochastically; two pools, by use or by a memory budget.

Conversions are compared with NumPy's float16 and TensorFlow's bfloat16, pattern by pattern.
"""

import numpy as np
import pytest

from tests.oracles.hash_table import pack
from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

BFLOAT16 = tf.bfloat16.as_numpy_dtype
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": BFLOAT16}
ADAGRAD = {"rule": "adagrad", "hyperparameters": [0.0, 0.1, 1e-7, 0.0, 0.0]}


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


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_training_rounds_once_after_float32_arithmetic(storage):
    """Adagrad keeps the row in its storage, and the accumulator of a 16-bit table in bfloat16."""
    random = np.random.default_rng(0)
    slot_storage = "float32" if storage == "float32" else "bfloat16"
    with new_table(dim=7, storage=storage, a=-1.0, **ADAGRAD) as table:
        ids = list(range(20))
        row = rounded([table.initial((0, i)) for i in ids], storage)
        accumulator = rounded(np.full([20, 7], 0.1), slot_storage)
        for step in range(1, 9):
            found = table.lookup([[ids]])
            np.testing.assert_array_equal(found.rows[:20], row)
            grads = random.normal(size=(20, 7)).astype(np.float32)
            table.apply(found, grads, learning_rate=0.1, step=step)
            accumulator = accumulator + grads * grads
            row = row - np.float32(0.1) * grads / (np.sqrt(accumulator) + np.float32(1e-7))
            row, accumulator = rounded(row, storage), rounded(accumulator, slot_storage)
        np.testing.assert_array_equal(table.find([[ids]]), row)
        keys, records = table.records(wide=["accumulator"])
        slots = records["accumulator"] if storage == "float32" else records["accumulator"].view(BFLOAT16)
        np.testing.assert_array_equal(slots.astype(np.float32), accumulator[keys])


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


def test_rows_get_hot():
    """A row has float16 until the third lookup, then float32. The conversion loses nothing."""
    random = np.random.default_rng(1)
    with new_table(dim=6, hot_after=3, a=-1.0) as table:
        row, seen = {}, dict.fromkeys(range(12), 0)
        for step in range(1, 9):
            ids = [i for i in range(12) if i % 4 == 0 or step % (i + 1) == 0]
            found = table.lookup([[ids], [ids[:2]]])
            for i in ids:
                row.setdefault(i, rounded(table.initial((0, i)), "float16"))
                seen[i] += 1
            np.testing.assert_array_equal(found.rows[: len(ids)], [row[i] for i in ids])
            grads = random.normal(size=(len(ids) + 2, 6)).astype(np.float32)
            table.apply(found, grads, learning_rate=0.1, step=step)
            for n, i in enumerate(ids):
                total = grads[n] + grads[len(ids) + n] if n < 2 else grads[n]
                row[i] = row[i] - np.float32(0.1) * total
                if seen[i] < 3:
                    row[i] = rounded(row[i], "float16")
        ids, records = table.records()
        assert sorted(ids) == sorted(row)
        np.testing.assert_array_equal(records["row"], [row[i] for i in ids])
        assert records["pool"].tolist() == [int(seen[i] < 3) for i in ids]
        assert 0 < records["pool"].sum() < len(ids)
        rows = ops.table_statistics(table.handle).bytes.numpy()[3:]
        assert rows.tolist() == [len(ids) - records["pool"].sum(), records["pool"].sum()]


def test_a_table_four_times_its_memory_budget_trains_bit_by_bit_alike(tmp_path):
    random = np.random.default_rng(2)
    row_bytes = 16 + 2 * 4 * 8
    spec = {"segments": 2, "dim": 8, **ADAGRAD}
    budget = 300 * row_bytes
    with new_table(**spec) as plain, new_table(**spec, memory_budget=budget, tier_folder=str(tmp_path)) as tiered:
        for step in range(1, 41):
            # Up to 4 * 2 * 30 = 240 of 1200 rows; the same ids from several sources.
            batch = random.integers(0, 600, [random.integers(1, 5), 2, 30]).tolist()
            message, splits, received = pack(batch)
            ops.table_prefetch(tiered.handle, message, splits)
            grads = random.normal(size=(len(received), 8)).astype(np.float32)
            answers = []
            for table in (plain, tiered):
                found = table.lookup(batch)
                answers.append(found.rows.numpy())
                table.apply(found, grads, learning_rate=0.1, step=step)
            np.testing.assert_array_equal(*answers)
            other = random.integers(0, 700, [2, 2, 50]).tolist()
            np.testing.assert_array_equal(plain.find(other), tiered.find(other))
            in_memory, in_file = ops.table_statistics(tiered.handle).bytes.numpy()[3:]
            assert in_memory <= 300 and in_memory + in_file == sum(row[0] for row in plain.statistics())
        assert in_file > 800
        for segment in range(2):
            (ids, records), (other_ids, other_records) = (t.records(segment, wide=["a"]) for t in (plain, tiered))
            np.testing.assert_array_equal(ids, other_ids)
            for field in set(records.dtype.names) - {"pool"}:
                np.testing.assert_array_equal(records[field], other_records[field])
    assert not list(tmp_path.iterdir()), "the file has no name"
