"""The training step on a table: lookups, inference lookups and updates against a dictionary.

Four files beside it test the rest: test_properties.py (any sequence of operations),
test_storage.py (16 bits, two pools), test_upkeep.py (all ops outside the training step) and
test_errors.py.
"""

import numpy as np
import pytest

from tests.oracles.hash_table import TableOracle, pack
from tests.support.compare import assert_same_integers
from tests.support.hash_tables import new_table
from tests.support.ids import EDGE_CASES, INT64_MAX, INT64_MIN
from tests.support.shape_functions import inferred
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

DTYPES = [tf.float32, tf.float16, tf.bfloat16]
SOURCES = {
    "one": [EDGE_CASES["negative_and_extreme"]],
    "the_same_twice": [[[1, 2, 3], [3]], [[1, 2, 3], [3]]],
    "one_without_ids": [[[7, 7], [INT64_MIN]], [[], []], [[7], []]],
    "none_has_ids": [[[], []], [[], []]],
    "no_source": [],
    "four": [[[1, -1], [INT64_MIN]], [[-1, INT64_MIN], []], [[], [1, 1]], [[INT64_MAX, 1], [-1, INT64_MAX]]],
}


def random_batch(random, sources, segments, most=40, vocabulary=30):
    return [
        [random.integers(-vocabulary, vocabulary, random.integers(0, most)).tolist() for _ in range(segments)]
        for _ in range(sources)
    ]


def check_answer(table, batch, found):
    """Asserts initial rows, an inverse that leads every id to the handle of its row, and zeros behind V."""
    received = pack(batch)[2]
    n = len(received)
    assert found.rows.shape[0] == 256 * -(-max(n, 1) // 256)
    np.testing.assert_array_equal(found.rows[:n], np.reshape([table.initial(key) for key in received], [n, table.dim]))
    assert not np.any(found.rows[n:])
    handles = found.handles.numpy()
    assert len(set(handles)) == len(handles) == len(set(received)) and (handles != -1).all()
    by_key = dict(zip(received, handles[found.inverse.numpy()]))
    assert_same_integers(handles[found.inverse.numpy()], np.array([by_key[key] for key in received], np.int64))
    assert len(set(by_key.values())) == len(by_key)


@pytest.mark.parametrize("segments", EDGE_CASES.values(), ids=EDGE_CASES)
def test_edge_cases_of_ids(segments):
    with new_table(len(segments)) as table:
        check_answer(table, [segments], table.lookup([segments]))
        assert_same_integers(ops.table_size(table.handle), [len(set(ids)) for ids in segments])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_unknown_ids_have_zeros_where_they_are_asked_for(dtype):
    record = {"dim": 3, "seed": 5, "initializer.a": 0.25, "unknown": "zeros"}
    table = ops.hash_table(shared_name="", tables=[record], anonymous=True)
    message, splits = tf.constant([2, 7, INT64_MIN], tf.int64), tf.constant([3])
    np.testing.assert_array_equal(ops.table_lookup(table, message, splits, dim=3).rows[:2], np.full([2, 3], 0.25))
    message, splits = tf.constant([4, INT64_MIN, 8, 7, INT64_MAX], tf.int64), tf.constant([5])
    rows = ops.table_read(table, message, splits, dim=3, dtype=dtype)[:4]
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), np.repeat([[0.25], [0], [0.25], [0]], 3, axis=1))
    assert ops.table_size(table).numpy().tolist() == [2]


def test_an_anonymous_table_is_its_own_and_goes_with_its_handle():
    make = {"shared_name": "tests/anonymous", "tables": [{"dim": 4}]}
    first, second = (ops.hash_table(**make, anonymous=True) for _ in range(2))
    ops.table_lookup(first, tf.constant([1, 9], tf.int64), tf.constant([2]), dim=4)
    assert [ops.table_size(table).numpy().tolist() for table in (first, second)] == [[1], [0]]
    assert ops.table_size(ops.hash_table(**make)).numpy().tolist() == [0]  # nor does its name exist


def test_an_option_that_the_op_lacks_is_refused_by_name():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a table has no option limits.max_row, got it for table 't'"
    ):
        record = {"name": "t", "dim": 4, "limits.max_row": 3}
        ops.hash_table(shared_name="tests/lacks", tables=[record])


@pytest.mark.parametrize("batch", SOURCES.values(), ids=SOURCES)
def test_sources(batch):
    segments = max((len(source) for source in batch), default=2)
    with new_table(segments, dim=3) as table:
        np.testing.assert_array_equal(
            table.find(batch), np.reshape([table.initial(key) for key in pack(batch)[2]], [-1, 3])
        )
        check_answer(table, batch, table.lookup(batch))
        distinct = set(pack(batch)[2])
        assert_same_integers(
            ops.table_size(table.handle), [sum(s == segment for s, _ in distinct) for segment in range(segments)]
        )


@pytest.mark.parametrize(("sources", "segments", "dim"), [(1, 1, 1), (2, 3, 4), (3, 2, 33), (4, 1, 16)])
def test_training_agrees_with_a_dictionary(sources, segments, dim):
    random = np.random.default_rng(sources)
    with new_table(segments, dim) as table:
        oracle = TableOracle(segments, table.initial)
        for step in range(1, 11):
            batch = random_batch(random, sources, segments)
            received = pack(batch)[2]
            other = random_batch(random, 2, segments, vocabulary=60)
            np.testing.assert_array_equal(
                table.find(other), np.reshape(oracle.find(pack(other)[2]), [len(pack(other)[2]), dim])
            )
            found = table.lookup(batch)
            np.testing.assert_array_equal(
                found.rows[: len(received)], np.reshape(oracle.lookup(received), [len(received), dim])
            )
            grads = random.normal(size=(len(received), dim)).astype(np.float32)
            table.apply(found, grads, scale=0.7, learning_rate=0.1, step=step)
            oracle.apply(received, grads, 0.7, 0.1)
            assert table.statistics() == oracle.statistics()


def test_large_batches_are_worked_on_by_several_threads_and_answered_alike():
    """Batches have 60,000 of 30,000 ids. Gradients are small integers, so NumPy may sum them in any order."""
    random = np.random.default_rng(0)
    with new_table(2, dim=2, distribution="constant", a=0.0) as table:
        want = np.zeros([2, 30_000, 2], np.float32)
        for step in range(1, 5):
            ids = random.integers(0, 30_000, [3, 2, 10_000])
            found = table.lookup(ids.tolist())
            flat = np.broadcast_to(np.arange(2)[None, :, None], ids.shape).ravel(), ids.ravel()
            np.testing.assert_array_equal(found.rows[: ids.size], want[flat])
            grads = random.integers(-4, 5, [ids.size, 2]).astype(np.float32)
            table.apply(found, grads, step=step)
            np.subtract.at(want, flat, grads)
        everything = [[list(range(30_000))] * 2]
        np.testing.assert_array_equal(table.find(everything), want.reshape(-1, 2))


def test_gradients_of_one_row_are_summed_in_the_order_received():
    """The sum of these numbers depends on the order, so equal bits with the ordered oracle show the order."""
    random = np.random.default_rng(1)
    batch = [[[1, 2] * 50], [[2, 1, 3] * 40]]
    received = pack(batch)[2]
    grads = (random.normal(size=(len(received), 5)) * 10.0 ** np.arange(5)).astype(np.float32)
    with new_table(dim=5) as table:
        forward, backward = TableOracle(1, table.initial), TableOracle(1, table.initial)
        table.train(batch, grads, scale=0.3, learning_rate=0.1)
        for oracle, order in ((forward, 1), (backward, -1)):
            oracle.lookup(received)
            oracle.apply(received[::order], grads[::order], 0.3, 0.1)
        np.testing.assert_array_equal(table.find([[[1, 2, 3]]]), forward.find([(0, 1), (0, 2), (0, 3)]))
        assert (table.find([[[1, 2, 3]]]) != backward.find([(0, 1), (0, 2), (0, 3)])).any()


def test_padding_of_gradients_is_ignored():
    with new_table() as table:
        found = table.lookup([[[1, 2]]])
        grads = np.full(found.rows.shape, np.nan, np.float32)
        grads[:2] = 1.0
        table.apply(found, grads)
        np.testing.assert_array_equal(table.find([[[1, 2]]]), found.rows.numpy()[:2] - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_rows_and_gradients_of_every_type(dtype):
    """Rows of 1.0 and small integer gradients are exact in all types. Sums are float32, so 4096 ones do not stop at
    float16's 2048.
    """
    with new_table(dim=3, distribution="constant", a=1.0) as table:
        batch = [[[8] * 4096 + [9]]]
        found = table.lookup(batch, dtype)
        assert found.rows.dtype == dtype
        np.testing.assert_array_equal(tf.cast(found.rows[:4097], tf.float32), np.ones([4097, 3]))
        table.apply(found, tf.ones([4097, 3], dtype))
        np.testing.assert_array_equal(table.find([[[8, 9]]]), [[1 - 4096] * 3, [0] * 3])
        np.testing.assert_array_equal(table.find([[[8]]], dtype).astype(np.float32), tf.cast([[-4095.0] * 3], dtype))


def test_accumulated_gradients_make_one_update():
    """Two batches make one update. It trains the rows of both by their sums, once, and clears the sums."""
    with new_table(dim=2, distribution="constant", a=0.0, window=2) as table:
        for batch, grad in (([[[1, 2]], [[2]]], 1.0), ([[[2, 3]]], 8.0)):
            found = table.lookup(batch)
            grads = tf.fill([len(pack(batch)[2]), 2], grad)
            ops.table_accumulate_gradients(table.handle, found, grads, scale=0.5)
        np.testing.assert_array_equal(table.find([[[1, 2, 3]]]), np.zeros([3, 2]))
        for _ in range(2):
            ops.table_apply_accumulated(table.handle, learning_rate=2.0, step=1)
            np.testing.assert_array_equal(table.find([[[1, 2, 3]]])[:, 0], [-1, -10, -8])


def test_an_accumulation_that_begins_drops_earlier_sums():
    with new_table(dim=2, distribution="constant", a=0.0) as table:
        found = table.lookup([[[1, 2]]])
        for begin, grad in ((False, 5.0), (True, 1.0), (False, 2.0)):
            ops.table_accumulate_gradients(table.handle, found, tf.fill([2, 2], grad), scale=1.0, begin=begin)
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        np.testing.assert_array_equal(table.find([[[1, 2]]]), np.full([2, 2], -3.0))


def test_inference_inserts_nothing_and_touches_nothing():
    with new_table() as table:
        table.lookup([[[1, 2]]])
        before = table.records(), table.statistics(), ops.table_clock(table.handle).numpy().tolist()
        got = table.find([[[2, 3, INT64_MIN, -1]], [[3]]])
        np.testing.assert_array_equal(got, [table.initial((0, i)) for i in (2, 3, INT64_MIN, -1, 3)])
        after = table.records(), table.statistics(), ops.table_clock(table.handle).numpy().tolist()
        np.testing.assert_array_equal(before[0][1], after[0][1])
        assert before[1:] == after[1:]


def test_calls_inside_a_function_run_in_program_order():
    with new_table(dim=1, distribution="constant", a=0.0) as table:
        message, splits, _ = pack([[[4, 4]]])

        @tf.function
        def steps():
            seen = []
            for _ in range(3):
                found = ops.table_lookup(table.handle, message, splits, dim=1)
                ops.table_apply_gradients(
                    table.handle, found, tf.ones([2, 1]), scale=1.0, learning_rate=1.0, step=tf.constant(1, tf.int64)
                )
                seen.append(found.rows[0, 0])
            return seen

        assert [row.numpy() for row in steps()] == [0.0, -2.0, -4.0]


def test_a_name_names_one_table():
    make = lambda: ops.hash_table(shared_name="tests/named", tables=[{"dim": 4}])  # noqa: E731
    message, splits, _ = pack([[[3, 4]]])
    ops.table_lookup(make(), message, splits, dim=4)
    assert_same_integers(ops.table_size(make()), [2])
    tf.raw_ops.DestroyResourceOp(resource=make())
    assert_same_integers(ops.table_size(make()), [0])
    tf.raw_ops.DestroyResourceOp(resource=make())


def test_shape_functions():
    resource, message, splits = (tf.resource, []), (tf.int64, [None]), (tf.int32, [4])
    lookup = lambda table, m, s: ops.table_lookup(table, m, s, dim=8)  # noqa: E731
    assert inferred(lookup, resource, message, splits) == [[None, 8], [None], [None]]
    find = lambda table, m, s: ops.table_read(table, m, s, dim=8, dtype=tf.float16)  # noqa: E731
    assert inferred(find, resource, message, splits) == [[None, 8]]
    assert inferred(ops.table_size, resource) == [[None]]
    assert inferred(ops.table_statistics, resource) == [[None, 6], [5], [None, 3]]
    assert inferred(ops.table_clock, resource) == [[2]]
    assert inferred(lambda table: ops.table_keys(table, 0), resource) == [[None], [None]]
    assert inferred(ops.table_read_records, resource, (tf.int64, [7])) == [[7, None]]
    assert inferred(lambda table, ids: ops.table_remove(table, 0, ids), resource, (tf.int64, [None])) == [[]]
    assert inferred(lambda table: ops.table_evict(table, 0, 1), resource) == [[]]
    assert inferred(lambda table: ops.table_tombstones(table, 0), resource) == [[None]]
    assert inferred(lambda table: ops.table_candidates(table, 0), resource) == [[None], [None]]
    with pytest.raises(ValueError, match="Shape must be rank 1 but is rank 2"):
        inferred(lookup, resource, (tf.int64, [3, 3]), splits)
    apply = lambda table, h, i, g: ops.table_apply_gradients(  # noqa: E731
        table, ops.TableRows(g, h, i), g, scale=1.0, learning_rate=1.0, step=tf.constant(1, tf.int64)
    )
    with pytest.raises(ValueError, match="Shape must be rank 2 but is rank 1"):
        inferred(apply, resource, (tf.int64, [3]), (tf.int32, [3]), (tf.float32, [3]))
