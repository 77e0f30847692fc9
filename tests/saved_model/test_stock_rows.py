"""Tables for plain TensorFlow answer their rows by id, and draw initial rows like our op, which has an oracle.

test_unknown.py has tables of several forms in one model.
"""

import numpy as np
import pytest

from tf_fusedrec import ops, tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.served_rows import GroupIds, StockTables, groups_of
from tf_fusedrec.saved_model.stock_initial_rows import InitialRows, drawn_rows

LIMITS = np.iinfo(np.int64)
IDS = np.concatenate(
    [[LIMITS.min, LIMITS.max, -1, 0, 1], np.random.default_rng(7).integers(LIMITS.min, LIMITS.max, 9000)]
)
A, B = 0.1, 0.7  # not representable in float32, as which the op takes them


def of_op(spec, dtype):
    n = len(IDS)
    return ops.initial_rows(
        tf.zeros([n, spec.dim], dtype), tf.zeros([n], tf.bool), tf.constant(IDS), tf.constant([0, n], tf.int64),
        seeds=[spec.seed], distribution=spec.distribution, a=spec.a, b=spec.b,
    )  # fmt: skip


def bits(rows):
    return np.ascontiguousarray(rows).view(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["constant", "uniform", "normal", "truncated_normal"])
def test_rows_are_those_of_the_op(distribution, tmp_path):
    """The graph optimizer rewrites the graph of a SavedModel. 45,000 numbers of each kind reach both ends of the
    quantile.
    """
    module, expected = tf.Module(), {}
    for dim, stored, dtype, seed in (
        (5, "float32", "float32", -3),
        (1, "float16", "float32", 2**62),
        (4, "bfloat16", "bfloat16", 9),
    ):
        spec = InitialRows(seed, distribution, A, B, dim, stored)

        def drawn(ids, spec=spec, dtype=dtype):
            return tf.cast(drawn_rows([spec], ids, tf.zeros_like(ids)), dtype)

        function = tf.function(drawn, input_signature=[tf.TensorSpec([None], tf.int64)])
        setattr(module, f"rows{dim}", function)
        expected[dim] = tf.cast(of_op(spec, stored), dtype)
        np.testing.assert_array_equal(bits(drawn(tf.constant(IDS))), bits(expected[dim]))
    tf.saved_model.save(module, str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    for dim, rows in expected.items():
        np.testing.assert_array_equal(bits(getattr(loaded, f"rows{dim}")(tf.constant(IDS))), bits(rows))
        assert getattr(loaded, f"rows{dim}")(tf.zeros([0], tf.int64)).shape == (0, dim)


ENDS = np.array([LIMITS.min, -1, 0, 1, 2**40, LIMITS.max])


def make(tables):
    groups = groups_of({name: {"dim": rows.shape[1], "dtype": "float32"} for name, (_, rows) in tables.items()})
    return groups, StockTables(tables, groups)


@pytest.mark.parametrize("count", [1, 8, 9, 17, 33, 64, 67])
def test_tables_of_one_form_are_joined(count):
    """Every number of bytes of a mask, the last bit of a mask, and tables beyond it; some tables are empty."""
    random, tables = np.random.default_rng(count), {}
    for name in range(count):
        ids = np.sort(random.choice(ENDS, random.integers(0, len(ENDS) + 1), replace=False))
        tables[str(name)] = ids, random.random([len(ids), 3], np.float32)
    groups, stock = make(tables)
    assert [len(group.names) for group in groups] == ([count] if count <= 64 else [64, count - 64])
    for number, group in enumerate(groups):
        asked, of = np.tile(ENDS, len(group.names)), np.repeat(np.arange(len(group.names)), len(ENDS))
        rows, exists = stock.find(number, GroupIds.of(group, [(name, tf.constant(ENDS)) for name in group.names]))
        for at, (id_, table) in enumerate(zip(asked, of)):
            ids, of_ids = tables[group.names[table]]
            assert exists[at] == (id_ in ids)
            np.testing.assert_array_equal(rows[at], of_ids[ids == id_][0] if id_ in ids else np.zeros(3))
        parts = [part[:-1] for part in applying.joined([tables[name] for name in group.names])]
        for name, again in zip(group.names, applying.separated(*parts, len(group.names))):
            np.testing.assert_array_equal(again[0], tables[name][0])
            np.testing.assert_array_equal(again[1], tables[name][1])


@pytest.mark.parametrize("ids", [[2, 1], [1, 1]])
def test_ids_that_do_not_ascend_are_refused(ids):
    with pytest.raises(ValueError, match="table 'item' of an export has ids that repeat or do not ascend. Use sorted"):
        make({"item": (np.array(ids), np.ones([2, 3]))})
