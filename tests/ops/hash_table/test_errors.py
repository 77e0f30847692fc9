"""A table's refusals name the argument, and change nothing."""

import functools

import numpy as np
import pytest

from tests.oracles.hash_table import pack
from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

Invalid, Exhausted = tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError
Precondition = tf.errors.FailedPreconditionError


@pytest.fixture
def table():
    with new_table(2) as made:
        yield made


MESSAGES = {
    "rank": ([[1, 0, 5]], [3], "message must have rank 1, got shape \\[1,3\\]"),
    "splits_rank": ([1, 0, 5], [[3]], "received_splits must have rank 1, got shape \\[1,1\\]"),
    "a_count_too_large": ([2, 0, 5], [3], "message of rank 0 counts 2 ids in segment 0, more than its 1 ids allow"),
    "a_negative_count": ([2, -1, 5], [3], "message of rank 0 counts"),
    "too_few_counted": ([1, 0, 5, 1, 0, 5, 6], [3, 4], "message of rank 1 counts 1 ids but holds 2"),
    "a_block_without_header": ([1], [1], "received_splits\\[0\\] must lie in \\[2, 1\\], got 1"),
    "a_block_beyond_the_end": ([1, 0, 5], [4], "received_splits\\[0\\] must lie in \\[2, 3\\], got 4"),
    "entries_left_over": ([1, 0, 5, 6], [3], "received_splits must sum to the 4 entries of message, got 3"),
}


@pytest.mark.parametrize(("message", "splits", "words"), MESSAGES.values(), ids=MESSAGES)
def test_messages(table, message, splits, words):
    message, splits = tf.constant(message, tf.int64), tf.constant(splits, tf.int32)
    for op in (ops.table_lookup, ops.table_read):
        with pytest.raises(Invalid, match=words):
            op(table.handle, message, splits, dim=4)
    with pytest.raises(Invalid, match=words):
        ops.table_prefetch(table.handle, message, splits)
    assert table.statistics() == [[0] * 6] * 2


GRADIENTS = {
    "too_few": ({"grads": np.ones([2, 4])}, "grads must have shape \\[>= 3, 4\\], .*got \\[2,4\\]"),
    "another_dim": ({"grads": np.ones([3, 5])}, "grads must have shape \\[>= 3, 4\\], .*got \\[3,5\\]"),
    "rank": ({"grads": np.ones([3])}, "grads must have rank 2, got shape \\[3\\]"),
    "handles_rank": ({"handles": [[1]]}, "handles must have rank 1, got shape \\[1,1\\]"),
    "inverse_rank": ({"inverse": [[1]]}, "inverse must have rank 1, got shape \\[1,1\\]"),
    "inverse_too_large": ({"inverse": [0, 2, 0]}, "inverse must lie in \\[0, 2\\), got 2"),
    "inverse_negative": ({"inverse": [0, -1, 0]}, "inverse must lie in \\[0, 2\\), got -1"),
    "no_handle": ({"handles": [-2, -1]}, "handles must be of a TableLookup of this table, got -2"),
    "a_far_handle": ({"handles": [-1, (1 << 32) + 99_999]}, "handles must be of a TableLookup .*got 4295067295"),
    "the_other_pool": ({"handles": [-1, (1 << 32) + (1 << 31)]}, "handles must be of a TableLookup .*got 6442450944"),
    "without_a_clock": ({"handles": [0, -1]}, "handles must be of one TableLookup"),
    "scale_rank": ({"scale": [1.0]}, "scale must have rank 0, got shape \\[1\\]"),
}
STEPS = {
    "a_negative_rate": ({"learning_rate": -0.5}, "learning_rate must be finite and >= 0, got -0.5"),
    "rate_not_a_number": ({"learning_rate": np.nan}, "learning_rate must be finite and >= 0, got nan"),
    "an_infinite_rate": ({"learning_rate": np.inf}, "learning_rate must be finite and >= 0, got inf"),
    "learning_rate_rank": ({"learning_rate": [1.0]}, "learning_rate must have rank 0, got shape \\[1\\]"),
    "step_zero": ({"step": 0}, "step must be >= 1, the number of this update, got 0"),
    "step_rank": ({"step": [1]}, "step must have rank 0, got shape \\[1\\]"),
}


@pytest.mark.parametrize(("wrong", "words"), [*GRADIENTS.values(), *STEPS.values()], ids=[*GRADIENTS, *STEPS])
def test_updates(table, wrong, words):
    found = table.lookup([[[1, 2, 1], []]])
    before = table.find([[[1, 2], []]])
    given = {"handles": found.handles, "inverse": found.inverse, "grads": np.ones([3, 4]), **wrong}
    rows = ops.TableRows(
        found.rows, tf.constant(given.pop("handles"), tf.int64), tf.constant(given.pop("inverse"), tf.int32)
    )
    grads = tf.constant(given.pop("grads"), tf.float32)
    step = {"learning_rate": given.get("learning_rate", 1.0), "step": given.get("step", 1)}
    scale = given.get("scale", 1.0)
    with pytest.raises(Invalid, match=words):
        ops.table_apply_gradients(table.handle, rows, grads, scale=scale, **step)
    if wrong.keys() & {"learning_rate", "step"}:
        with pytest.raises(Invalid, match=words):
            ops.table_apply_accumulated(table.handle, **step)
    else:
        with pytest.raises(Invalid, match=words):
            ops.table_accumulate_gradients(table.handle, rows, grads, scale=scale)
    np.testing.assert_array_equal(table.find([[[1, 2], []]]), before)


def test_coming_gradients_of_another_lookup(table):
    found = table.lookup([[[1, 2, 1], []]])
    with pytest.raises(
        Invalid, match="coming\\[1\\] must lie in \\[0, 2\\), got 2. Take handles and all inverses from one"
    ):
        ops.table_apply_gradients(
            table.handle, found, tf.ones([3, 4]), scale=1.0, learning_rate=1.0, step=1, coming=[[1], [0, 2]]
        )


OTHERS = {
    "other_ids": [[[1, 2], [5]]],
    "another_order": [[[2, 1], [4]]],
    "other_segments": [[[1], [2, 4]]],
    "other_sources": [[[1, 4], []], [[2], []]],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_look_ahead_of_another_message(table, other):
    table.train([[[1, 2], [4, 5]]], np.ones([4, 4], np.float32))
    message, splits, _ = pack([[[1, 2], [4]]])
    ahead = ops.table_look_ahead(table.handle, message, splits, dim=4)
    before = table.statistics()
    for op in (ops.table_lookup, functools.partial(ops.table_read, window=1)):
        with pytest.raises(Invalid, match="message must be that of the look-ahead, .* got other ids or another order"):
            op(table.handle, *pack(other)[:2], ahead, dim=4)
    assert table.statistics() == before
    rows = ops.table_read(table.handle, message, splits, ahead, window=1, dim=4)[:3]
    np.testing.assert_array_equal(rows, table.find([[[1, 2], [4]]]))


def test_reads_as_training(table):
    message, splits = tf.constant([1, 0, 7], tf.int64), tf.constant([3])
    ahead = ops.table_look_ahead(table.handle, message, splits, dim=4)
    other, foreign = tf.constant([2, 0, 7, 8], tf.int64), ahead._replace(handles=tf.constant([99], tf.int64))
    for arguments, words in (
        ((other, tf.constant([4]), ahead), "of a TableLookAhead of the same 2 ids, got shapes"),
        ((message, splits, foreign), "handles_ahead must be of a TableLookAhead of this"),
        ((tf.constant([5, 0, 7], tf.int64), splits), "rank 0"),
    ):
        with pytest.raises(Invalid, match=words):
            ops.table_read(table.handle, *arguments, window=1, dim=4)
    for op in (ops.table_lookup, ops.table_read, functools.partial(ops.table_read, window=1)):
        with pytest.raises(Invalid, match="dim must be that of the table, 4, got 3"):
            op(table.handle, message, splits, dim=3)
    with pytest.raises(Invalid, match="rank 0"):
        ops.table_lookup(table.handle, tf.constant([5, 0, 7], tf.int64), splits, with_rows=False, dim=4)
    assert table.statistics() == [[0] * 6] * 2


def test_a_look_ahead_of_another_table(table):
    message, splits, _ = pack([[[1, 2], [4]]])
    with new_table(2) as other:
        for one in (table, other):
            one.lookup([[[1, 2], [4]]])
        ahead = ops.table_look_ahead(other.handle, message, splits, dim=4)
        with pytest.raises(Invalid, match="message must be that of the look-ahead, of the same table"):
            ops.table_lookup(table.handle, message, splits, ahead, dim=4)


def test_doubled_handles(table):
    """Two threads would write one row."""
    found = table.lookup([[[1, 2, 1], []]])
    before, grads = table.find([[[1, 2], []]]), tf.ones([3, 4])
    doubled = found._replace(handles=tf.gather(found.handles, [0, 1, 1]))
    words = f"handles must be distinct, got {found.handles[1]} twice. Nothing has changed"
    with pytest.raises(Invalid, match=words):
        table.apply(doubled, grads)
    with pytest.raises(Invalid, match=words):
        ops.table_accumulate_gradients(table.handle, doubled, grads, scale=1.0)
    np.testing.assert_array_equal(table.find([[[1, 2], []]]), before)
    refused = found._replace(handles=tf.concat([found.handles, [-1, -1]], 0))
    table.apply(refused, grads)  # no row has two writers
    np.testing.assert_allclose(table.find([[[1, 2], []]]), before - [[2.0], [1.0]], rtol=1e-6)


def test_some_handles_of_a_lookup(table):
    """Rows without a gradient stay as they are, whatever the rule."""
    with new_table(rule="adam", hyperparameters=[0.0, 0.1, 0.001, 1e-7, 0.0]) as table:
        table.train([[[1, 2]]], np.ones([2, 4], np.float32))
        before, found = table.records(wide=("m", "v"))[1].copy(), table.lookup([[[1, 2]]])
        table.apply(found._replace(inverse=found.inverse[:1]), tf.ones([1, 4]), step=2)
        table.apply(found._replace(inverse=found.inverse[:0]), tf.ones([0, 4]), step=3)
        after = table.records(wide=("m", "v"))[1]
        changed = (before["m"] != after["m"]).any(-1)
        assert changed.sum() == 1 and (before["row"] != after["row"]).any(-1).tolist() == changed.tolist()
        first = found._replace(handles=found.handles[:1], inverse=found.inverse[:1] * 0)
        table.apply(first, tf.ones([1, 4]), step=4)


def test_handles_of_two_lookups(table):
    one, other = table.lookup([[[1], []]]), table.lookup([[[2], []]])
    mixed = one._replace(handles=tf.concat([one.handles, other.handles], 0))
    with pytest.raises(Invalid, match="of one TableLookup, got some of lookup 1 and some of lookup 2"):
        table.apply(mixed, tf.ones([1, 4]))


def test_gradients_of_rows_that_have_left():
    """Another id has the row now, and must not train by the first id's gradient."""
    with new_table(max_rows=2, eviction="lru") as table:
        found = table.lookup([[[1, 2]]])
        table.lookup([[[3, 4]]])
        before = table.find([[[3, 4]]])
        words = "rows of training lookup 1 have been evicted, removed or moved by a later one"
        with pytest.raises(Precondition, match=words):
            table.apply(found, tf.ones([2, 4]))
        with pytest.raises(Precondition, match=words):
            ops.table_accumulate_gradients(table.handle, found, tf.ones([2, 4]), scale=1.0)
        np.testing.assert_array_equal(table.find([[[3, 4]]]), before)


@pytest.mark.parametrize("load", ["rows", "clock"])
def test_gradients_from_before_a_load(table, load):
    found = table.lookup([[[1], []]])
    ids, handles = ops.table_keys(table.handle, 0)
    if load == "rows":
        ops.table_import(table.handle, 0, ids, ops.table_read_records(table.handle, handles))
    else:
        ops.table_set_clock(table.handle, ops.table_clock(table.handle))
    with pytest.raises(Precondition, match="rows of training lookup 1 have been evicted, removed or moved"):
        table.apply(found, tf.ones([1, 4]))


@pytest.mark.parametrize("segment", [-1, 2])
def test_segments(table, segment):
    ids = tf.constant([1], tf.int64)
    for call in (
        lambda: ops.table_keys(table.handle, segment),
        lambda: ops.table_import(table.handle, segment, ids, tf.zeros([1, 32], tf.uint8)),
        lambda: ops.table_remove(table.handle, segment, ids),
        lambda: ops.table_evict(table.handle, segment, 1),
        lambda: ops.table_tombstones(table.handle, segment),
        lambda: ops.table_candidates(table.handle, segment),
        lambda: ops.table_import_candidates(table.handle, segment, ids, ids),
    ):
        with pytest.raises(Invalid, match=rf"segment must lie in \[0, 2\), got {segment}"):
            call()


def test_upkeep(table):
    ids, handle = tf.constant([1, 2], tf.int64), table.handle
    for call, words in (
        (lambda: ops.table_read_records(handle, [[0]]), "handles must have rank 1"),
        (lambda: ops.table_read_records(handle, [0]), "handles must be of a TableKeys of this table, got 0"),
        (lambda: ops.table_read_records(handle, [-1]), "handles must be of a TableKeys of this table, got -1"),
        (lambda: ops.table_import(handle, 0, [ids], tf.zeros([2, 32], tf.uint8)), "ids must have rank 1"),
        (lambda: ops.table_import(handle, 0, ids, tf.zeros([64], tf.uint8)), "records must have rank 2"),
        (
            lambda: ops.table_import(handle, 0, ids, tf.zeros([2, 36], tf.uint8)),
            r"records must have shape \[2, 32\], got \[2,36\]. They must come from a table of the same spec",
        ),
        (
            lambda: ops.table_import(handle, 0, ids, tf.zeros([1, 32], tf.uint8)),
            r"records must have shape \[2, 32\], got \[1,32\]",
        ),
        (
            lambda: ops.table_import(handle, 0, [7, 8, 7], tf.zeros([3, 32], tf.uint8)),
            "ids must be distinct, got 7 twice",
        ),
        (
            lambda: ops.table_import(handle, 0, ids, np.full([2, 32], 255, np.uint8)),
            r"the clock in a record must lie in \[0, 2147483647\], got 4294967295",
        ),
        (lambda: ops.table_set_clock(handle, [2**31, 0]), r"clock must lie in \[0, 2147483647\], got 2147483648"),
        (lambda: ops.table_remove(handle, 0, [ids]), "ids must have rank 1"),
        (lambda: ops.table_evict(handle, 0, -1), "count must be >= 0, got -1"),
        (lambda: ops.table_import_candidates(handle, 0, [ids], [ids]), "ids must have rank 1"),
        (lambda: ops.table_import_candidates(handle, 0, ids, [1]), r"counts must have the shape of ids, .*got \[1\]"),
        (lambda: ops.table_import_candidates(handle, 0, ids, [3, 0]), r"counts must lie in \[1, 2\^31\), got 0"),
        (lambda: ops.table_import_candidates(handle, 0, ids, [-1, 1]), r"counts must lie in \[1, 2\^31\), got -1"),
        (lambda: ops.table_keys(handle, 0, since=[0, -1]), r"since must lie in \[0, 4294967295\], got -1"),
        (lambda: ops.table_set_clock(handle, [1]), r"clock must have shape \[2\], got \[1\]"),
    ):
        with pytest.raises(Invalid, match=words):
            call()
    assert table.statistics() == [[0] * 6] * 2


SPECS = {
    "an_unknown_option": ({"limits.max_row": 3, "names": "t"}, "no option limits.max_row, got it for table 't'"),
    "a_rule": ({"rule": "sgdd"}, "rule must be one of sgd, momentum, .* got 'sgdd'"),
    "a_parameter": ({"rule.momentum": 0.5}, "rule sgd: it has no parameter momentum"),
    "a_parameter_in_text": ({"rule.clipnorm": "1"}, "rule.clipnorm of table '' must be a number, got '1'"),
    "a_parameter_left_out": ({"rule": "adam"}, r"rule adam: one_minus_beta_1 must be finite and lie in \[1.*, got 0"),
    "rules_of_two_groups": (
        {"segments": 2, "rule.clipnorm": [0.5, 1], "names": ["a", "b"]},
        "the parameters of rule sgd of table 'b' must be those of the other tables of its group",
    ),
    "mixed_alone": ({"storage": "mixed"}, "hot_after of table '' is 0 with storage.dtype 'mixed': a number > 0"),
    "mixed_and_tier": (
        {"hot_after": 2, "memory_budget": 99, "tier_folder": "."},
        "a budget does not work with 'mixed'",
    ),
    "a_budget_without_a_folder": (
        {"memory_budget": 99},
        "memory_budget_per_rank of table '' is 99 with tier.folder ''",
    ),
    "a_folder": (
        {"memory_budget": 99, "tier_folder": "/no/such"},
        "tier_folder '/no/such' must be a folder that can be written",
    ),
    "a_limit_below_0": ({"ttl": -1, "names": "a"}, r"limits.ttl of table 'a' must be an int in \[0, .*\], got -1"),
    "no_admission": ({"admission_count": 0}, r"limits.admission_count of table '' must be an int in \[1, .*, got 0"),
    "a_limit_beyond_memory": ({"max_rows": 2**62}, r"max_rows_per_rank .* int in \[0, .*, got 4611686018427387904"),
    "a_fraction": ({"ttl": 1.5}, "limits.ttl .* must be an int in .*, got 1.5"),
    "a_policy": ({"eviction": "mru"}, "eviction of table '' must be one of 'none', 'lru', 'lfu', got 'mru'"),
    "a_flag": ({"record_tombstones": 1}, "record_tombstones of table '' must be True or False, got 1"),
    "a_text": ({"tier_folder": True}, "tier.folder of table '' must be a text, got True"),
    "a_number": ({"a": "x"}, "initializer.a of table '' must be a finite number, got 'x'"),
    "tables_of_two_groups": (
        {"segments": 2, "averaged": [False, True], "names": ["a", "b"]},
        "averaged of table 'b' must be that of the other tables of its group, False, got True",
    ),
    "a_sum_of_budgets": (
        {"segments": 2, "memory_budget": [2**48, 1], "tier_folder": "."},
        "must sum to at most 281474976710656 and",
    ),
}


@pytest.mark.parametrize(("spec", "words"), SPECS.values(), ids=SPECS)
def test_tables_that_cannot_be(spec, words):
    with pytest.raises(Invalid, match=words), new_table(**spec):
        pass


@pytest.mark.parametrize("names", [[], ["clicks", "users"]])
def test_max_rows_smaller_than_a_batch(names):
    with new_table(2, max_rows=3, eviction="lru", **({"names": names} if names else {})) as table:
        table.train([[[1, 2], []]], np.ones([2, 4], np.float32))
        before = table.find([[[1, 2, 5], []]])
        which = "table 'clicks'" if names else "segment 0"
        with pytest.raises(Exhausted, match=f"max_rows_per_rank of {which} is 3, but a batch needs 1 rows more while"):
            table.lookup([[[1, 2, 3, 4], []]])
        np.testing.assert_array_equal(table.find([[[1, 2, 5], []]]), before)
    words = "and eviction is 'none'. The table is what it was"
    with new_table(max_rows=3) as table, pytest.raises(Exhausted, match=words):
        table.lookup([[[1, 2, 3, 4]]])


BUDGET = "memory_budget_per_rank holds 4 rows, but a batch needs"
FULL = {
    "no_eviction": ({"max_rows": 2}, "max_rows_per_rank of"),
    "another_segment_evicts": ({"max_rows": [2, 2], "eviction": ["lru", "none"]}, "max_rows_per_rank of"),
    "a_budget": ({"memory_budget": 4 * 32}, BUDGET),
    "a_budget_and_eviction": ({"memory_budget": 4 * 32, "max_rows": 3, "eviction": "lfu"}, BUDGET),
}


@pytest.mark.parametrize(("spec", "words"), FULL.values(), ids=FULL)
def test_a_lookup_that_fails_leaves_no_trace(spec, words, tmp_path):
    spec = {**spec, "admission_count": 2, "tier_folder": str(tmp_path), "record_tombstones": True}
    with new_table(2, **spec) as table, new_table(2, **spec) as other:
        state = lambda one: [  # noqa: E731
            *(x.tobytes() for s in (0, 1) for x in one.records(s)),
            *(x.numpy().tolist() for s in (0, 1) for x in ops.table_candidates(one.handle, s)),
            *(ops.table_tombstones(one.handle, s).numpy().tolist() for s in (0, 1)),
            ops.table_clock(one.handle).numpy().tolist(), one.statistics(),
        ]  # fmt: skip
        batches = [[[[1, 3], [5]]], [[[1, 2], [5, 6]]], [[[2], [6]]], [[[1], [5, 7]]]]
        for batch in batches:
            for one in (table, other):
                found = one.lookup(batch)
        before = state(table)
        for _ in range(3):  # ids that are known, new, counted, and admitted
            with pytest.raises(Exhausted, match=words):
                table.lookup([[[1, 3, 4, 1], [5, 6, 7, 8]]])
            assert state(table) == before
        table.apply(found, tf.ones([3, 4]))
        other.apply(found, tf.ones([3, 4]))
        for one in (table, other):
            ops.table_remove(one.handle, 0, [1])
            one.lookup([[[3, 2], [5]]])
        assert state(table) == state(other)


def test_the_clock_ends(table):
    most = 2**31 - 1
    ops.table_set_clock(table.handle, [most - 1, 5])
    before = table.find([[[1], []]])
    table.train([[[1], []]], np.ones([1, 4], np.float32))
    np.testing.assert_allclose(table.find([[[1], []]]), before - 1, rtol=1e-6)
    with pytest.raises(Exhausted, match=f"the table's clock is at {most}, the last lookup that it can count"):
        table.lookup([[[1], []]])
    assert ops.table_clock(table.handle).numpy()[0] == most


def test_a_table_that_is_gone():
    with new_table() as table:
        pass
    with pytest.raises(tf.errors.NotFoundError):
        table.find([[[1]]])
