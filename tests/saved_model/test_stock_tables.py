"""Tables for plain TensorFlow answer their rows by id; unknown ids get zeros."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.saved_model import applying
from tf_fusedrec.saved_model.served_rows import StockTables, groups_of

LIMITS = np.iinfo(np.int64)
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
        asked, of = np.repeat(ENDS, len(group.names)), np.tile(np.arange(len(group.names)), len(ENDS))
        rows, exists = stock.find(number, [], tf.constant(asked), tf.constant(of))
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
