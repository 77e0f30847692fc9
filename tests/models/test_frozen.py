"""The frozen embedding answers as a plain table does; unknown ids get zeros."""

import numpy as np
import pytest

from models.frozen import FrozenEmbedding
from tests.models.batches import ragged
from tests.models.plain_embedding import ROWS, PlainEmbedding
from tf_fusedrec import tf

TABLE_OF = {"dense": "item", "list": "item", "other": "user"}


def test_known_ids_answer_as_the_plain_table():
    plain = PlainEmbedding(TABLE_OF, 4)
    frozen = FrozenEmbedding({name: (np.arange(ROWS), table.numpy()) for name, table in plain.tables.items()}, TABLE_OF)
    inputs = {
        "dense": tf.constant([[0, 63], [5, 5]], tf.int64),
        "list": ragged([2, 0, 1], [63, 0, 7]),
        "other": tf.constant([], tf.int64),
    }
    expected, rows = plain(inputs), frozen(inputs)
    for name in ("dense", "other"):
        np.testing.assert_array_equal(rows[name], expected[name])
    np.testing.assert_array_equal(rows["list"].values, expected["list"].values)
    np.testing.assert_array_equal(rows["list"].row_splits, expected["list"].row_splits)
    assert not frozen.weights


@pytest.mark.parametrize("ids", [[-7, 3, 2**62], [5], []])
def test_unknown_ids_get_zeros(ids):
    rows = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2) + 1
    frozen = FrozenEmbedding({"item": (np.array(ids, np.int64), rows)}, {"item_id": "item"})
    limits = np.iinfo(np.int64)
    asked = np.array([*ids, limits.min, -8, 0, 4, 2**62 + 1, limits.max], np.int64)
    expected = np.concatenate([rows, np.zeros([6, 2])])
    np.testing.assert_array_equal(frozen({"item_id": tf.constant(asked)})["item_id"], expected)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, r"feature 'item_id' reads table 'item'; there are \[\]"),
        ({"item": (np.array([2, 1]), np.ones([2, 3]))}, "ids of table 'item' must ascend"),
        ({"item": (np.array([1, 1]), np.ones([2, 3]))}, "ids of table 'item' must ascend"),
        ({"item": (np.array([1]), np.ones([2, 3]))}, r"table 'item' must be ids \[n\] and rows \[n, D\]"),
    ],
)
def test_bad_tables_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        FrozenEmbedding(tables, {"item_id": "item"})
