"""A table's ops: what random histories (test_properties.py) do not show."""

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
BATCHES = {
    **{name: [segments] for name, segments in EDGE_CASES.items()},
    "the_same_twice": [[[1, 2, 3], [3]], [[1, 2, 3], [3]]],
    "one_without_ids": [[[7, 7], [INT64_MIN]], [[], []], [[7], []]],
    "none_has_ids": [[[], []], [[], []]],
    "no_source": [],
    "four": [[[1, -1], [INT64_MIN]], [[-1, INT64_MIN], []], [[], [1, 1]], [[INT64_MAX, 1], [-1, INT64_MAX]]],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_new_rows(batch):
    """Initial rows, an inverse that leads every id to the handle of its row, and zeros after row V."""
    segments = max((len(source) for source in batch), default=2)
    received = pack(batch)[2]
    n, distinct = len(received), set(received)
    with new_table(segments, dim=3) as table:
        initial = np.reshape([table.initial(key) for key in received], [n, 3])
        np.testing.assert_array_equal(table.find(batch), initial)
        found = table.lookup(batch)
        assert found.rows.shape[0] == 256 * -(-max(n, 1) // 256) and not np.any(found.rows[n:])
        np.testing.assert_array_equal(found.rows[:n], initial)
        sizes = [sum(s == segment for s, _ in distinct) for segment in range(segments)]
        assert_same_integers(ops.table_statistics(table.handle).segments[:, 0], sizes)
    handles = found.handles.numpy()
    assert len(set(handles)) == len(handles) == len(distinct) and (handles != -1).all()
    by_key = dict(zip(received, handles[found.inverse.numpy()]))
    assert_same_integers(handles[found.inverse.numpy()], np.array([by_key[key] for key in received], np.int64))
    assert len(set(by_key.values())) == len(by_key)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_unknown_ids_have_zeros_where_they_are_asked_for(dtype):
    record = {"dim": 3, "seed": 5, "initializer.a": 0.25, "unknown": "zeros"}
    table = ops.hash_table(shared_name="", tables=[record], anonymous=True)
    message, splits = tf.constant([2, 7, INT64_MIN], tf.int64), tf.constant([3])
    np.testing.assert_array_equal(ops.table_lookup(table, message, splits, dim=3).rows[:2], np.full([2, 3], 0.25))
    message, splits = tf.constant([4, INT64_MIN, 8, 7, INT64_MAX], tf.int64), tf.constant([5])
    rows = ops.table_read(table, message, splits, dim=3, dtype=dtype)[:4]
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), np.repeat([[0.25], [0], [0.25], [0]], 3, axis=1))
    assert ops.table_statistics(table).segments[:, 0].numpy().tolist() == [2]


def test_an_anonymous_table_is_its_own_and_goes_with_its_handle():
    make = {"shared_name": "tests/anonymous", "tables": [{"dim": 4}]}
    first, second = (ops.hash_table(**make, anonymous=True) for _ in range(2))
    ops.table_lookup(first, tf.constant([1, 9], tf.int64), tf.constant([2]), dim=4)
    assert [ops.table_statistics(table).segments[:, 0].numpy().tolist() for table in (first, second)] == [[1], [0]]
    wide = [ops.hash_table(shared_name="", tables=[{"dim": dim, "name": 80 * "t"}], anonymous=True) for dim in (1, 2)]
    assert [ops.table_read(table, [1, 9], [2], dim=dim).shape[1] for dim, table in enumerate(wide, 1)] == [1, 2]
    anew = ops.hash_table(**make)
    assert ops.table_statistics(anew).segments[:, 0].numpy().tolist() == [0]  # nor does its name exist


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


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize(
    "spec", [{}, {"admission_count": 2}, {"storage": "mixed", "hot_after": 2}, {"storage": "bfloat16"}], ids=str
)
def test_sums_of_rows_and_their_gradients(spec, accumulated):
    """Sums of rows where they are, and of rows that are converted or that admission refuses. Numbers are exact."""
    batch, index, splits = [[[1, 2, 3], [1]], [[2], []]], [0, 2, 2, 4, 3, 1, 4], [0, 3, 3, 5, 7]
    sums = ops.RowSums(tf.constant(index), tf.constant(splits, tf.int64))
    message, received_splits, received = pack(batch)
    gradients = np.arange(8, dtype=np.float32).reshape(4, 2)
    with new_table(2, dim=2, distribution="constant", a=0.5, **spec) as table:
        want = dict.fromkeys(received, np.full(2, 0.5))
        for visit in (1, 2, 3):
            found = ops.table_lookup(table.handle, message, received_splits, sums=sums, dim=2)
            of_sums = [[received[i] for i in index[begin:end]] for begin, end in zip(splits, splits[1:])]
            np.testing.assert_array_equal(
                found.rows, [sum((want[key] for key in keys), np.zeros(2)) for keys in of_sums]
            )
            if accumulated:
                ops.table_accumulate_gradients(table.handle, found, gradients, sums, scale=0.5)
                ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=visit)
            else:
                args = {"scale": 0.5, "learning_rate": 1.0, "step": visit}
                ops.table_apply_gradients(table.handle, found, gradients, sums, **args)
            if visit >= spec.get("admission_count", 1):
                for keys, gradient in zip(of_sums, gradients):
                    want |= {key: want[key] - keys.count(key) * gradient / 2 for key in keys}
        np.testing.assert_array_equal(table.find(batch), [want[key] for key in received])


WRONG_SUMS = {
    "an_id_that_was_not_received": (([3], [0, 1]), "sum_index must lie in \\[0, 3\\), the received ids, got 3"),
    "another_number_of_terms": (([0], [0, 2]), "sum_splits must"),
}


@pytest.mark.parametrize(("sums", "words"), WRONG_SUMS.values(), ids=WRONG_SUMS)
def test_wrong_sums_are_refused(sums, words):
    sums = ops.RowSums(tf.constant(sums[0]), tf.constant(sums[1], tf.int64))
    with new_table(dim=2) as table:
        found = table.lookup([[[1, 2, 3]]])
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            ops.table_lookup(table.handle, *pack([[[1, 2, 3]]])[:2], sums=sums, dim=2)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 2]), sums, scale=1.0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="grads must have shape \\[>= 2, 2\\]"):
            two = ops.RowSums(tf.constant([0, 1]), tf.constant([0, 1, 2], tf.int64))
            ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 2]), two, scale=1.0)


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


def test_rows_whose_gradients_wait_stay():
    """All rows stay that were looked up since the first of several waiting lookups."""
    with new_table(max_rows=4, eviction="lru") as table:
        table.lookup([[[9]]])
        for ids in ([1, 2], [3]):
            found = table.lookup([[ids]])
            ops.table_accumulate_gradients(table.handle, found, np.ones([len(ids), 4], np.float32), scale=1.0)
        table.lookup([[[6]]])
        with pytest.raises(tf.errors.ResourceExhaustedError, match="rows whose gradients wait, may not leave"):
            table.lookup([[[7]]])
        assert sorted(table.records()[0]) == [1, 2, 3, 6]


def test_an_accumulation_that_begins_drops_earlier_sums():
    with new_table(dim=2, distribution="constant", a=0.0) as table:
        found = table.lookup([[[1, 2]]])
        for begin, grad in ((False, 5.0), (True, 1.0), (False, 2.0)):
            ops.table_accumulate_gradients(table.handle, found, tf.fill([2, 2], grad), scale=1.0, begin=begin)
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        np.testing.assert_array_equal(table.find([[[1, 2]]]), np.full([2, 2], -3.0))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_gradients_in_parts_train_a_row_with_its_last_part(storage):
    """Parts of one update: numbers of ids, and a gradient for all of them. Sums that an update left are dropped."""
    parts = [([0, 1, 1], 1.0), ([1, 2], 8.0), ([4, 2], np.nan), ([4, 3], 2.0)]
    rows_after = [[-2, 0, 0, 0, 0], [-2, -10, 0, 0, 0], [-2, -10, 0, 0, 0], [-2, -10, 0, -2, 0]]
    with new_table(dim=2, distribution="constant", a=0.0, storage=storage) as table:
        found = table.lookup([[[1, 2, 3, 4, 5]]])
        of_part = [tf.gather(found.inverse, ids) for ids, _ in parts]

        def apply(i):
            (ids, gradient), rows = parts[i], found._replace(inverse=of_part[i])
            grads = tf.fill([len(ids), 2], tf.constant(gradient, tf.float32))
            left_out = ops.table_apply_gradients(
                table.handle, rows, grads, scale=1.0, learning_rate=1.0, step=1, coming=of_part[i + 1 :], begin=i == 0
            )
            return sorted(np.flatnonzero(found.inverse.numpy() == n).item() for n in left_out.numpy())

        apply(0)  # of an update that never ends
        table.apply(found, np.zeros([5, 2], np.float32))  # one part is a whole update
        version = int(ops.table_clock(table.handle)[1])
        for i, rows in enumerate(rows_after):
            assert apply(i) == ([2, 4] if i == 2 else [])
            np.testing.assert_array_equal(table.find([[[1, 2, 3, 4, 5]]])[:, 0], rows)
        assert int(ops.table_clock(table.handle)[1]) == version + 1


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
    assert_same_integers(ops.table_statistics(make()).segments[:, 0], [2])
    tf.raw_ops.DestroyResourceOp(resource=make())
    assert_same_integers(ops.table_statistics(make()).segments[:, 0], [0])
    tf.raw_ops.DestroyResourceOp(resource=make())


def test_shape_functions():
    resource, message, splits = (tf.resource, []), (tf.int64, [None]), (tf.int32, [4])
    lookup = lambda table, m, s: ops.table_lookup(table, m, s, dim=8)  # noqa: E731
    assert inferred(lookup, resource, message, splits) == [[None, 8], [None], [None]]
    find = lambda table, m, s: ops.table_read(table, m, s, dim=8, dtype=tf.float16)  # noqa: E731
    assert inferred(find, resource, message, splits) == [[None, 8]]
    peek = lambda table, m, s: ops.table_read(table, m, s, window=1, dim=3)  # noqa: E731
    assert inferred(peek, resource, message, splits) == [[None, 3]]
    touch = lambda table, m, s: ops.table_lookup(table, m, s, with_rows=False, dim=8)  # noqa: E731
    assert inferred(touch, resource, message, splits) == [[0, 8], [None], [None]]
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


def test_a_copy_without_the_clock_trains_alike():
    """A row whose last lookup has the number of the copy's next one must not count as touched."""
    with new_table() as table, new_table() as copy:
        table.lookup([[[1, 2]]])
        copy.restore(*table.records())
        for one in (table, copy):
            one.train([[[2, 1, 2]]], np.ones([3, 4], np.float32))
        np.testing.assert_array_equal(copy.find([[[1, 2]]]), table.find([[[1, 2]]]))
        np.testing.assert_array_equal(copy.records()[1]["count"], [2, 2])


def test_a_delta_holds_what_changed():
    with new_table() as table:
        table.train([[[1, 2, 3]]], np.ones([3, 4], np.float32))
        clock = ops.table_clock(table.handle)
        assert table.records(since=clock)[0].size == 0
        table.lookup([[[1, 4]]])  # 1 is touched, which delays its eviction; 4 is made
        table.train([[[2]]], np.ones([1, 4], np.float32))
        assert sorted(table.records(since=clock)[0]) == [1, 2, 4]
        assert sorted(table.records()[0]) == [1, 2, 3, 4]


def test_a_part_without_rows_leaves_the_waiting_gradients_pinned():
    """As on a rank without ids in one of the accumulated steps. Clearing the table drops the sums."""
    with new_table(1, max_rows=1, eviction="lru") as table:
        found = table.lookup([[[1]]])
        ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 4]), scale=1.0)
        nothing = ops.TableRows(tf.zeros([0, 4]), found.handles[:0], found.inverse[:0])
        ops.table_accumulate_gradients(table.handle, nothing, tf.zeros([0, 4]), scale=1.0)
        with pytest.raises(tf.errors.FailedPreconditionError, match="while accumulated gradients wait"):
            ops.table_remove(table.handle, 0, [1])
        with pytest.raises(tf.errors.ResourceExhaustedError):  # the row may not leave
            table.lookup([[[2]]])
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        found = table.lookup([[[2]]])
        ops.table_accumulate_gradients(table.handle, found, tf.ones([1, 4]), scale=1.0)
        ops.table_clear(table.handle)
        table.lookup([[[2]]])
        ops.table_apply_accumulated(table.handle, learning_rate=1.0, step=1)
        np.testing.assert_array_equal(table.find([[[2]]]), [table.initial((0, 2))])


def test_memory_of_keys_does_not_count_copies():
    ids = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 3000).tolist()
    key_bytes = lambda table: int(ops.table_statistics(table.handle).bytes[0])  # noqa: E731
    with new_table() as table, new_table() as once:
        table.lookup([[ids]] * 64)
        once.lookup([[ids]])
        assert key_bytes(table) == key_bytes(once)
        for _ in range(2):
            table.restore(*table.records())
        assert key_bytes(table) == key_bytes(once)


def test_statistics_of_bytes():
    """Counts bytes of keys, and of rows in chunks of at most 16 MB. New rows use the room of removed rows."""
    with new_table(dim=16) as table:
        assert_same_integers(ops.table_statistics(table.handle).bytes, [0] * 5)
        for begin in range(0, 100_000, 10_000):
            table.lookup([[list(range(begin, begin + 10_000))]])
        # 64 bytes hold five keys, at a load between 0.60 / 2 and 0.75.
        least, most = 64 / 5 / 0.75 * 100_000, 2 * 64 / 5 / 0.60 * 100_000
        keys, rows, *others = ops.table_statistics(table.handle).bytes.numpy().tolist()
        assert least <= keys <= most
        assert 100_000 * (16 + 64) <= rows <= 100_000 * (16 + 64) + (32 << 20)
        assert others == [0, 100_000, 0]
        for begin in range(0, 1_000_000, 100_000):
            ops.table_remove(table.handle, 0, list(range(begin, begin + 100_000)))
            table.lookup([[list(range(begin + 100_000, begin + 200_000))]])
        assert least <= ops.table_statistics(table.handle).bytes.numpy()[0] <= most
        assert_same_integers(ops.table_statistics(table.handle).bytes[1:], [rows, 0, 100_000, 0])


@pytest.mark.parametrize("decays", [False, True])
def test_a_hot_set_that_moves_on_leaves_few_float32_rows(decays):
    """A set of ids comes for 8 steps and never again. Counts at a halving add up to at most 2 * steps * B, to which the
    lookups since then add steps * B. So 3 * steps * B / hot_after rows can have been hot since their last turn, beside
    the rows of the last lookup.
    """
    sets, each, hot_after, steps = 100, 64, 4, 16
    wide, highest = [], 0
    with new_table(hot_after=hot_after, frequency_decay_steps=steps if decays else 0) as table:
        for step in range(sets * 8):
            first = step // 8 * each
            handles = table.lookup([[list(range(first, first + each))]]).handles.numpy()
            highest = max(highest, *handles[handles < 2**31].tolist(), 0)
            wide.append(int(ops.table_statistics(table.handle).bytes[3]))
        if not decays:
            assert wide[-1] == sets * each
            return
        assert each <= max(wide) <= (3 * steps // hot_after + 1) * each
        # 64 shards take rows 32 at a time. Rows that are not used again would be 6,400.
        assert highest < 64 * 32
        for step in range(2 * steps):
            table.lookup([[[-1 - step]]])
        assert int(ops.table_statistics(table.handle).bytes[3]) == 0


def test_a_memory_budget_counts_a_row_that_two_sources_ask_for_once(tmp_path):
    with new_table(memory_budget=100 * 32, tier_folder=str(tmp_path)) as table:
        for begin in (0, 60, 120):
            table.lookup([[list(range(begin, begin + 60))]])
        rows = table.lookup([[list(range(60))]] * 2).rows
        np.testing.assert_array_equal(rows[:60], rows[60:120])
        assert int(ops.table_statistics(table.handle).bytes[3]) <= 100
