"""Rows: every operation on arrays equals the same operation on a list of lists."""

import numpy as np
import pytest

from tf_fusedrec.data.rows import Ragged, RowQueue, Rows, splits_of


def _ragged(lists):
    return Ragged(np.array(sum(lists, []), np.int64), splits_of(np.array([len(row) for row in lists], np.int64)))


LISTS = [[1, 2, 3], [], [4], [5, 6], [], [7, 8, 9, 10]]
ROWS = Rows({"user": np.arange(6), "item": _ragged(LISTS)}, 6)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 1, 1, 0], [4], []])
def test_take(order):
    taken = ROWS.take(np.array(order, np.int64))
    assert taken.num_rows == len(order)
    assert taken.columns["user"].tolist() == order
    assert taken.columns["item"].lengths().tolist() == [len(LISTS[row]) for row in order]
    assert taken.columns["item"].values.tolist() == sum([LISTS[row] for row in order], [])


@pytest.mark.parametrize("longer", [1, 100])  # long lists are not joined before they are taken
def test_queue_pops_across_chunks(longer):
    lists = [row * longer for row in LISTS]
    queue = RowQueue()
    rows = Rows({"user": np.arange(6), "item": _ragged(lists)}, 6)
    for begin in (0, 2, 4):
        queue.append(rows.slice(begin, begin + 2))
    for begin, count in ((0, 1), (1, 4), (5, 1)):
        block = queue.pop(count)
        for order in ([*range(count)], [*range(count)][::-1], [0, 0], []):
            taken = block.take(np.array(order, np.int64))
            wanted = [begin + row for row in order]
            assert (taken.num_rows, taken.columns["user"].tolist()) == (len(order), wanted)
            assert taken.columns["item"].lengths().tolist() == [len(lists[row]) for row in wanted]
            assert taken.columns["item"].values.tolist() == sum([lists[row] for row in wanted], [])
