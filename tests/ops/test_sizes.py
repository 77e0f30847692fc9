"""Attributes and scalar inputs far beyond any memory raise an InvalidArgumentError with their name, at once."""

import contextlib
import gc
import time

import numpy as np
import pytest

from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library

HUGE = [2**31, 2**32 + 1, 2**62, 2**63 - 1]
NEGATIVE = [-1, -(2**31), -(2**63)]
IDS, ROWS = np.array([1, 2, 3]), np.zeros([3, 4], np.float32)
INDEX = np.array([0, 1, 2], np.int32)
BAGS = ROWS[:2], INDEX, np.array([0, 1, 3]), np.ones(2, np.float32)  # grads, index, bag_splits, bag_scale


def _size(n):
    return tf.constant(n, tf.int64)


def _fuse(segments):
    about = {"segments": [0], "feature_names": ["f"], "bag_sizes": [1], "combiners": ["sum"]}
    return ops.fuse_ids([IDS], {}, num_segments=segments, **about)


def _partition(ranks):
    return ops.rank_partition(IDS, _size([0, 3]), num_ranks=ranks)


def _unpack(segments):
    return library.fusedrec_unpack_message(
        message=tf.zeros([0], tf.int64), received_splits=tf.zeros([0], tf.int32), num_segments=segments
    )


# The call that takes the size, and the name that the message must contain.
CALLS = {
    "recover_grad": (lambda n: ops.recover_grad(ROWS, INDEX, _size(n)), "num_rows"),
    "recover_grad, padded": (lambda n: ops.recover_grad(ROWS, INDEX, _size(n), pad=True), "num_rows"),
    "pooled": (lambda n: ops.pooled_recover_grad(*BAGS, _size(n)), "num_rows"),
    "pooled, padded": (lambda n: ops.pooled_recover_grad(*BAGS, _size(n), pad=True), "num_rows"),
    "fuse_ids": (_fuse, "num_segments"),
    "rank_partition": (_partition, "num_ranks"),
    "unpack_message": (_unpack, "num_segments"),
}  # fmt: skip
# Options of a table by the smallest size that it refuses.
OPTIONS = {
    path: option["most"] + 1
    for path, option in ops.table_schema().items()
    if "most" in option and path != "seed"
}  # fmt: skip


@contextlib.contextmanager
def _uncollected():
    """Pauses the garbage collector, which takes seconds in a process that has run many tests."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuses(name, call):
    begin = time.process_time()
    with _uncollected(), pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=name) as caught:
        call()
    assert time.process_time() - begin < 2, "it took long to refuse"
    return str(caught.value)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("traced", [False, True])
def test_sizes_beyond_any_memory_are_refused_at_once(op, traced):
    call, name = CALLS[op]
    for size in HUGE + NEGATIVE:
        run = tf.function(lambda: call(size)) if traced else lambda: call(size)  # noqa: B023
        text = _refuses(name, run)
        assert str(size) in text, text


def test_positions_beyond_32_bits_are_refused():
    try:
        memory = tf.raw_ops.Empty(shape=[2**16, 2**15], dtype=tf.int64)  # which nobody touches
    except tf.errors.ResourceExhaustedError:
        pytest.skip("no 16 GiB of address space here")
    ids, index = tf.reshape(memory, [-1]), tf.reshape(tf.bitcast(memory, tf.int32), [-1])  # 2^31 and 2^32 numbers
    splits, bags, scale = tf.constant([2**30, 2**30]), _size([0, 2**32]), tf.ones([1])
    found = ops.TableRows(ROWS, IDS, INDEX)
    with new_table() as table:
        for name, call in (
            ("the message must be at most 2147483647, got 2147483648",
             lambda: ops.table_lookup(table.handle, ids, splits, dim=4)),
            ("the message must be at most", lambda: ops.unpack_message(ids, splits, num_segments=1)),
            ("handles must be at most", lambda: table.apply(found._replace(handles=ids), ROWS)),
            ("inverse must be at most", lambda: table.apply(found._replace(inverse=index), ROWS)),
            ("index must be at most", lambda: ops.recover_grad(ROWS, index, _size(3))),
            ("index must be at most", lambda: ops.pooled_recover_grad(ROWS[:1], index, bags, scale, _size(3))),
        ):  # fmt: skip
            _refuses(f"the size of {name}", call)


def test_the_largest_sizes_that_are_sensible_work():
    assert _fuse(1000).segment_splits.shape == [1001]
    assert _partition(2000).send_splits.shape == [2000]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_tables_beyond_any_memory_are_refused(option, tmp_path):
    for size in {OPTIONS[option], 2**63 - 1, -1, -(2**63)}:

        def make(size=size):
            record = {"dim": 4, "tier.folder": str(tmp_path), option: size}
            ops.hash_table(shared_name=f"sizes/{option}/{size}", tables=[record])

        assert str(size) in _refuses(option, make)


def test_scalars_of_tables_beyond_their_range_are_refused():
    with new_table() as table:
        table.lookup([[[1, 2]]])
        for size in [*HUGE[1:], *NEGATIVE]:
            for clock in ([size, 1], [1, size]):
                _refuses("since", lambda: ops.table_keys(table.handle, 0, since=_size(clock)))  # noqa: B023
                _refuses("clock", lambda: ops.table_set_clock(table.handle, _size(clock)))  # noqa: B023
        for size in HUGE + NEGATIVE:
            _refuses("segment", lambda: ops.table_keys(table.handle, size))  # noqa: B023
        for size in NEGATIVE:
            _refuses("count", lambda: ops.table_evict(table.handle, 0, size))  # noqa: B023
        assert int(ops.table_evict(table.handle, 0, 2**63 - 1)) == 0
        np.testing.assert_array_equal(np.sort(table.records()[0]), [1, 2])
