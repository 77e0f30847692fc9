"""Sums of gradients over several parts and lookups, on the device, against dictionaries. Bits are compared."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.hash_table_leaving import answer_of
from tests.cuda.device_table import BAD_HANDLE, BAD_INVERSE, INVALID, OUT_OF_MEMORY, STALE, WAITING, DeviceTable, Step
from tests.oracles.hash_table import pack

DIM = 18


def table_of(kernels, **more):
    return DeviceTable(kernels, DIM, [1, 2], chunk_rows=32, a=0.5, **more)


def batch_of(random, length=60, vocabulary=70):
    return [[(random.zipf(1.3, length) % vocabulary).tolist(), [7] * 20] for _ in range(3)]


def rows_of(table):
    """Returns the numbers of all rows and the versions that changed them, by (segment, id)."""
    rows, versions = {}, {}
    for segment in range(2):
        for id_, record in zip(*table.export(segment)):
            key = segment, int(id_)
            versions[key] = int(record[8:12].view(np.uint32)[0])
            rows[key] = record[16:].view(np.float32)[:DIM]
    return rows, versions


def accumulate(table, sums, found, cut, random, begin=False):
    """Adds one part of a lookup, and the same in float32 to `sums`, in the order of the device."""
    (inverse, handles, received), scale = found, np.float32(0.7)
    grads = random.normal(size=[len(received[cut]) + 1, DIM]).astype(np.float32)
    table.accumulate(handles, inverse[cut], grads, begin=begin, scale=0.7)
    totals = {}
    for key, grad in zip(received[cut], grads):
        totals[key] = totals[key] + grad * scale if key in totals else grad * scale
    for key, total in totals.items():
        sums[key] = sums.get(key, np.zeros(DIM, np.float32)) + total


def look_up(table, batch):
    message, splits, received = pack(batch)
    _, inverse, handles = table.lookup(message, splits)
    return inverse, handles, received


def check_sums_of_several_parts(kernels):
    """Adds parts of two lookups, of which one part is empty and one never comes, twice; rows are added meanwhile."""
    random = np.random.default_rng(8)
    table = table_of(kernels)
    for update in (1, 2):
        sums = {}
        for lookup in range(2):
            found = look_up(table, batch_of(random, 40 + 40 * update, 70 * update))
            for part, cut in enumerate((slice(0, 50), slice(50, 50), slice(50, 130))):
                accumulate(table, sums, found, cut, random, begin=lookup == 0 and part == 0)
        before, versions = rows_of(table)
        table.apply_accumulated(learning_rate=0.25, step=update)
        after, changed = rows_of(table)
        assert 0 < len(sums) < len(before)
        for key, row in before.items():
            assert (changed[key] != versions[key]) == (key in sums), f"{key}: rows with gradients change, and no other"
            wanted = row - np.float32(0.25) * sums[key] if key in sums else row
            np.testing.assert_array_equal(after[key], wanted, err_msg=f"the sum of {key} over all parts")
    table.close()


@once
def check_sums_are_dropped(kernels):
    """`begin` drops earlier sums, and so does a clear. An update without sums changes no row."""
    random = np.random.default_rng(9)
    table, sums = table_of(kernels), {}
    for begin in (False, False, True):
        found = look_up(table, batch_of(random))
        sums = {} if begin else sums
        accumulate(table, sums, found, slice(0, 90), random, begin)
    table.accumulate(found[1][:0], found[0][:0], np.zeros([0, DIM], np.float32))
    before, _ = rows_of(table)
    table.apply_accumulated()
    after, _ = rows_of(table)
    for key, row in before.items():
        np.testing.assert_array_equal(after[key], row - sums[key] if key in sums else row, err_msg="sums were dropped")
    for end in (lambda: table.accumulate([], [], np.zeros([0, DIM], np.float32), begin=True), table.clear):
        accumulate(table, {}, look_up(table, batch_of(random)), slice(0, 90), random)
        end()
        look_up(table, batch_of(random))
        before, version = rows_of(table)[0], table.size()[1]["version"]
        table.apply_accumulated()
        assert table.size()[1]["version"] == version + 1
        for key, row in rows_of(table)[0].items():
            np.testing.assert_array_equal(row, before[key], err_msg="sums were dropped")
    table.close()


@once
def check_rows_whose_gradients_wait_stay(kernels):
    """Neither eviction nor a time to live takes them out, and none is removed; after the update they may leave."""
    random = np.random.default_rng(10)
    table = table_of(kernels, max_rows=60, eviction="lru", ttl=2)
    old, others = ([[list(range(begin, begin + 30)), [2]]] for begin in (100, 200))
    look_up(table, old)
    found = look_up(table, [[list(range(20)), [1]]])
    accumulate(table, {}, found, slice(0, 5), random)
    for _ in range(4):
        look_up(table, others)
        left = {id_ for segment, id_ in rows_of(table)[0] if segment == 0}
        assert left >= {*range(20)}, "rows whose gradients wait have left"
    assert not left & {*range(100, 130)}, "rows without waiting gradients have stayed"
    assert answer_of(table.remove, 0, [3]) == WAITING
    assert table.evict(0, 60) == 0, "rows whose gradients wait have left"
    table.apply_accumulated()
    assert table.remove(0, [3]) == 1
    look_up(table, others)
    assert {id_ for segment, id_ in rows_of(table)[0] if segment == 0} == {*range(200, 230)}
    table.close()


@once
def check_sums_that_are_not_finite_are_left_out(kernels):
    """A place is returned once, when its sum ceases to be finite. The row stays as it is."""
    table = table_of(kernels)
    inverse, handles, received = look_up(table, [[list(range(9)), [7]]])
    grads = np.ones([10, DIM], np.float32)
    spoilt = grads.copy()
    spoilt[3, 17] = np.nan
    more = spoilt.copy()
    more[5, 0] = np.inf
    answers = [table.accumulate(handles, inverse, one) for one in (grads, spoilt, more, grads)]
    assert answers == [[], [inverse[3]], [inverse[5]], []]
    before, _ = rows_of(table)
    table.apply_accumulated()
    for key, row in rows_of(table)[0].items():
        left_out = key in (received[3], received[5])
        np.testing.assert_array_equal(row, before[key] - (0 if left_out else 4), err_msg=f"{key}")
    table.close()


@once
def check_refused_parts_change_no_sum(kernels):
    """Wrong handles, old ones, and each missing allocation leave the sums as they were."""
    random = np.random.default_rng(11)
    table, sums = table_of(kernels), {}
    old = look_up(table, batch_of(random))
    found = look_up(table, batch_of(random))
    accumulate(table, sums, found, slice(0, 60), random)
    inverse, handles, _ = found
    grads = np.ones([len(inverse), DIM], np.float32)
    for begin in (False, True):
        assert answer_of(table.accumulate, handles + 10**6, inverse, grads, begin=begin) == BAD_HANDLE
        assert answer_of(table.accumulate, handles, inverse + len(handles), grads, begin=begin) == BAD_INVERSE
        assert answer_of(table.accumulate, handles[:0], inverse, grads, begin=begin) == BAD_INVERSE
    mixed = np.where(np.arange(len(handles)) == 0, old[1][0], handles)
    assert answer_of(table.accumulate, mixed, inverse, grads) == BAD_HANDLE
    assert kernels.answer("table_apply_accumulated", table.handle, Step(1.0, 0)) == INVALID
    later = look_up(table, batch_of(random, 90, 900))
    ones = np.ones([len(later[0]), DIM], np.float32)
    for left in range(9):
        table.allocations_left = left
        answer = answer_of(table.accumulate, later[1], later[0], ones)
        if answer == 0:
            break
        assert answer == OUT_OF_MEMORY
        table.allocations_left = None
    assert left >= 5
    table.allocations_left = None
    for key in set(later[2]):
        sums[key] = sums.get(key, np.zeros(DIM, np.float32)) + np.float32(later[2].count(key))
    before, _ = rows_of(table)
    table.apply_accumulated()
    for key, row in rows_of(table)[0].items():
        wanted = before[key] - sums[key] if key in sums else before[key]
        np.testing.assert_array_equal(row, wanted, err_msg="refused parts are no part of a sum")
    table.remove(0, [found[2][0][1]])
    assert answer_of(table.accumulate, later[1], later[0], ones) == STALE
    table.close()
