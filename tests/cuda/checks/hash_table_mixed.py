"""A mixed table on the device: rows in 16 bits and in float32, against dictionaries (tests/oracles/hash_table.py)."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.hash_table_leaving import DIM, answer_of, compare, oracle_of, table_of
from tests.cuda.device_table import OUT_OF_MEMORY, DeviceTable
from tests.oracles.hash_table import pack

HISTORIES = [
    {"hot_after": 2, "frequency_decay_steps": [4, 9], "window": 2},
    {"hot_after": 3, "frequency_decay_steps": [3, 70], "max_rows": [24, 20], "eviction": ["lfu", "lru"]},
    {"hot_after": 2, "frequency_decay_steps": [0, 2], "ttl": [6, 0], "admission_count": [1, 2]},
]


def batch_of(random, step, segments=2):
    """Ids of a hot set that moves on, from two sources."""
    draw = lambda: (step // 6 * 9 + random.geometric(0.3, random.integers(1, 7))).tolist()  # noqa: E731
    return [[draw() for _ in range(segments)] for _ in range(2)]


def train(table, oracle, batch, random, waiting, window):
    """Looks up. Updates come window - 1 lookups late. float16 must round them."""
    message, splits, received = pack(batch)
    rows, inverse, handles = table.lookup(message, splits)
    np.testing.assert_array_equal(rows[: len(received)], oracle.lookup(received))
    grads = (random.integers(-8, 9, [len(received), DIM]) / 2**14).astype(np.float32)  # sums are exact
    waiting.append((handles, inverse, received, grads))
    if len(waiting) == window:
        handles, inverse, received, grads = waiting.pop(0)
        table.apply(handles, inverse, grads, learning_rate=0.5)
        oracle.apply(received, grads, 1.0, 0.5)


def hot_keys(oracle):
    return {(s, i) for s, rows in enumerate(oracle.rows) for i, row in rows.items() if row.hot}


def check_rows_move_between_their_pools(kernels):
    """Rows get hot, cool, leave, and come back. A delta holds the rows that were demoted."""
    for number, options in enumerate(HISTORIES):
        random, waiting, moved = np.random.default_rng(number), [], [0, 0]
        table, oracle = table_of(kernels, 2, **options), oracle_of(2, **options)
        for step in range(20):
            totals, hot, there = table.size()[1], hot_keys(oracle), [{*rows} for rows in oracle.rows]
            train(table, oracle, batch_of(random, step), random, waiting, options.get("window", 1))
            gone = {(s, i) for s, i in hot - hot_keys(oracle) if i in oracle.rows[s]}
            moved[0] += sum(i in there[s] for s, i in hot_keys(oracle) - hot)
            moved[1] += len(gone)
            for segment in range(2) if gone else ():
                ids, _ = table.export(segment, since=(totals["clock"], totals["version"]))
                assert {i for s, i in gone if s == segment} <= {*ids.tolist()}, "a delta holds the demoted rows"
            cold = sum(map(len, oracle.rows)) - len(hot_keys(oracle))
            assert table.size()[1]["cold_rows"] == cold, f"rows of 16 bits at step {step}"
            if step % 6 == 5:
                compare(table, oracle)
        assert min(moved) > 4, moved
        message, splits, received = pack(batch_of(random, 24))
        np.testing.assert_array_equal(table.find(message, splits)[0][: len(received)], oracle.find(received))
        table.close()


def check_places_are_used_again(kernels):
    """New ids come for three steps each. Only as many float32 rows have memory as were hot at once."""
    table = mixed_slots(kernels, "sgd", frequency_decay_steps=2)
    initial = []
    for step in range(24):
        ids = range(step // 3 * 20, step // 3 * 20 + 20)
        rows = table.lookup([20, 0, *ids], [22])[0][:20]
        initial += [rows] if step % 3 == 0 else []
    totals = table.size()[1]
    of_metas = 5 * 32 * (32 + 4 + 4)  # with a free row and a place
    # The set that gets hot finds the places of one half of the set before, whose other half is demoted with it.
    assert totals["chunk_bytes"] - of_metas == 32 * (4 + 32), "one chunk for 32 float32 rows"
    assert totals["cold_rows"] == 140 and table.remove(0, range(160)) == 160
    assert table.size()[1]["cold_rows"] == 0, "places of rows that were removed"
    rows = table.lookup([160, 0, *range(160)], [162])[0][:160]
    np.testing.assert_array_equal(rows, np.concatenate(initial), err_msg="initial rows in places of others")
    again = table.size()[1]
    assert again["chunk_bytes"] == totals["chunk_bytes"] and again["cold_rows"] == 160
    table.close()


def restored(kernels, exported, known, **more):
    """Writes records of segment 1 over `known` ids, of which every other is hot. Returns the table."""
    table = mixed_slots(kernels, **more)
    for ids in (known, known[::2]):
        table.lookup([0, len(ids), *ids], [2 + len(ids)])
    table.restore(1, *exported)
    return table


def mixed_slots(kernels, rule="adagrad", **more):
    of_rule = {"sgd": {}, "adam": {"epsilon": 1e-6, "one_minus_beta_1": 0.1, "one_minus_beta_2": 0.1}}
    numbers = of_rule.get(rule, {"epsilon": 1e-6, "initial_accumulator_value": 0.1})
    more = {"hot_after": 2, "distribution": "uniform", "a": -0.5, "b": 0.5, "chunk_rows": 32, **more}
    return DeviceTable(kernels, 5, [1, 2], rule=rule, **numbers, **more)


@once
def check_records_name_their_pools(kernels):
    """Restores rows into the pools of their records, over rows in either pool, with all kinds of slots."""
    random = np.random.default_rng(3)
    for rule in ("adagrad", "rowwise_adagrad", "adam"):
        for stochastic in (False, True):
            more = {"rule": rule, "stochastic_rounding": stochastic}
            table = mixed_slots(kernels, **more)
            for ids in (range(60), range(0, 60, 3)):
                _, inverse, handles = table.lookup([0, len(ids), *ids], [2 + len(ids)])
                table.apply(handles, inverse, random.normal(size=[len(ids), 5]).astype(np.float32), learning_rate=0.1)
            ids, records = table.export(1)
            pools = records[:, 12:16].copy().view(np.uint32)[:, 0]
            assert pools.tolist() == [int(i % 3 > 0) for i in ids]
            other = restored(kernels, (ids, records), list(range(40)), **more)
            again, same = other.export(1)
            order = np.argsort(again)
            np.testing.assert_array_equal(again[order], ids)
            np.testing.assert_array_equal(same[order], records, err_msg="records that went through another table")
            assert other.size()[1]["cold_rows"] == np.sum(pools)
            np.testing.assert_array_equal(*(t.find([0, 60, *range(60)], [62])[0] for t in (table, other)))
            other.close()
            table.close()


@once
def check_float32_numbers_of_a_cold_record_are_rounded(kernels):
    table = mixed_slots(kernels, "sgd")
    numbers = np.array([[1 / 3, -1e-3, 2049, 70000, 1e-7]], np.float32)
    record = np.concatenate([np.array([[4, 1, 3, 1]], np.uint32).view(np.uint8), numbers.view(np.uint8)], axis=1)
    table.restore(0, np.array([7]), record)
    rounded = np.minimum(numbers, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(table.find([1, 0, 7], [3])[0][:1], rounded)
    assert table.size()[1]["cold_rows"] == 1
    table.close()


@once
def check_moves_without_memory_change_nothing(kernels):
    """Fails every allocation of a lookup that makes, promotes and demotes rows, and of an import."""
    options = {"hot_after": 2, "frequency_decay_steps": 3}
    table, oracle = table_of(kernels, 1, **options), oracle_of(1, **options)
    batches = [range(40), range(40), range(40, 90), range(40, 80), range(200, 280)]
    for number, ids in enumerate(batches):
        for left in range(30):
            table.allocations_left = left
            answer = answer_of(table.lookup, [len(ids), *ids], [1 + len(ids)])
            table.allocations_left = None
            if answer == 0:
                break
            assert answer == OUT_OF_MEMORY
            compare(table, oracle)
        assert left >= 2, number
        oracle.lookup([(0, i) for i in ids])
        compare(table, oracle)
    ids, records = table.export(0)
    pools = records[:, 12:16].copy().view(np.uint32)[:, 0]
    assert 20 < pools.sum() < len(pools) - 20
    other = table_of(kernels, 1, **options)
    other.lookup([60, *range(30, 90)], [61])
    before = other.export(0)[1]
    for left in range(30):
        other.allocations_left = left
        answer = answer_of(other.restore, 0, ids, records)
        other.allocations_left = None
        if answer == 0:
            break
        assert answer == OUT_OF_MEMORY
        np.testing.assert_array_equal(other.export(0)[1], before)
    assert left >= 6 and other.size()[1]["cold_rows"] == pools.sum()
    other.close()
    table.close()
