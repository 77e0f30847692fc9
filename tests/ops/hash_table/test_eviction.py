"""Eviction in a table of more than 65,536 rows, where a lookup looks at some parts of the hash."""

import numpy as np
import pytest

from tests.oracles.hash_table import table_hash
from tests.support.hash_tables import new_table

MAX_ROWS, PARTS, NEW_IDS, KNOWN_IDS, STEPS = 70_000, 1_024, 1_500, 400, 30
FIRST = MAX_ROWS - 10 * NEW_IDS


def leaving(hashes, ranks, size, clock, exact):
    """Places of the rows that leave among those that may. `size`: all rows; a hash of the id breaks ties of ranks."""

    def lowest(places, ties, count):
        return places[np.lexsort((ties[places], ranks[places]))[:count]]

    excess = size + NEW_IDS - MAX_ROWS
    if excess <= 0:
        return np.zeros([0], np.int64)
    if exact:
        return lowest(np.arange(len(ranks)), hashes, excess + MAX_ROWS // 16)
    of_part, part, gone = size // PARTS // 16, int(f"{clock % PARTS:010b}"[::-1], 2), np.zeros([0], np.int64)
    rotated = hashes << np.uint64(10) | hashes >> np.uint64(54)
    while len(gone) < excess:
        parts = min(-(-(excess - len(gone)) // of_part), PARTS - part)
        number = (hashes >> np.uint64(54)).astype(int) - part
        gone = np.append(gone, lowest(np.flatnonzero((number >= 0) & (number < parts)), rotated, parts * of_part))
        part = (part + parts) % PARTS
    return gone


@pytest.mark.parametrize(("eviction", "exact"), [("lru", False), ("lfu", False), ("lru", True)])
def test_the_lowest_rows_of_some_parts_leave(eviction, exact):
    random, evictions = np.random.default_rng(3), 0
    limits = {"limits.max_rows_per_rank": MAX_ROWS, "limits.eviction": eviction, "limits.exact_eviction": exact}
    ids, hashes, last, count = (np.zeros([0], dtype) for dtype in (np.int64, np.uint64, np.int64, np.int64))
    with new_table(dim=1, **limits) as table:
        for clock in range(1, STEPS + 1):
            new = np.arange(NEW_IDS if clock > 1 else FIRST) + 10**6 * clock
            is_known = np.isin(ids, random.choice(ids, KNOWN_IDS, replace=False) if clock > 1 else ids)
            table.lookup([[[*new.tolist(), *ids[is_known].tolist()]]])
            last, count = np.where(is_known, clock, last), count + is_known
            free = np.flatnonzero(~is_known)
            ranks = (count if eviction == "lfu" else 0 * count) << 32 | last
            gone = free[leaving(hashes[free], ranks[free], len(ids), clock, exact)] if clock > 1 else free
            # The rows that leave are about the lowest sixteenth of all.
            assert np.searchsorted(np.sort(ranks), ranks[gone].max(initial=0)) <= 0.1 * len(ids)
            evictions += len(gone)
            ids, hashes, last, count = (np.delete(values, gone) for values in (ids, hashes, last, count))
            ids = np.append(ids, new)
            hashes = np.append(hashes, np.array([table_hash(i) for i in new.tolist()], np.uint64))
            last, count = np.append(last, np.full(len(new), clock)), np.append(count, np.ones(len(new), int))
            (
                keys,
                *_,
            ) = table.statistics()[0]
            assert keys == len(ids) <= MAX_ROWS
            if clock % 10 == 0:
                np.testing.assert_array_equal(np.sort(table.records()[0]), np.sort(ids))
        assert table.statistics()[0][3] == evictions > NEW_IDS
