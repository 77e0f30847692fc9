"""Tables for plain TensorFlow answer their rows by id; unknown ids get zeros."""

import numpy as np
import pytest

from tf_fusedrec import tf
from tf_fusedrec.saved_model.stock_tables import StockTables

LIMITS = np.iinfo(np.int64)


@pytest.mark.parametrize("ids", [[LIMITS.min, -7, 3, 2**62, LIMITS.max], [5], [LIMITS.min], [LIMITS.max], []])
def test_rows_by_id(ids):
    rows = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2) + 1
    tables = StockTables({"item": (np.array(ids, np.int64), rows)})
    known = dict(zip(ids, rows))
    asked = np.array([*ids, *ids[::-1], LIMITS.min, -8, -1, 0, 4, 2**62 + 1, LIMITS.max], np.int64)
    expected = [known.get(int(id), np.zeros(2, np.float32)) for id in asked]
    np.testing.assert_array_equal(tables.find("item", tf.constant(asked))[0], np.array(expected))
    assert tables.find("item", tf.zeros([0], tf.int64))[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([2, 1], np.ones([2, 3]), "table 'item' of an export has ids that repeat or do not ascend. Remedy"),
        ([1, 1], np.ones([2, 3]), "table 'item' of an export has ids that repeat or do not ascend. Remedy"),
        (
            [1],
            np.ones([2, 3]),
            r"table 'item' of an export has shapes \(1,\) and \(2, 3\), want ids \[n\] and rows \[n, D\]. Remedy",
        ),
    ],
)
def test_bad_tables_are_refused(ids, rows, message):
    with pytest.raises(ValueError, match=message):
        StockTables({"item": (np.array(ids), rows)})
