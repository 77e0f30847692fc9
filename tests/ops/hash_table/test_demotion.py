"""Counts of lookups decay, and rows of a mixed table return to float16: random histories agree with a model.

The model (tests/oracles/hash_table.py) halves every count and visits every row at each step. The table does neither.
"""

import numpy as np
import pytest

from tests.oracles.hash_table import Exhausted, TableOracle, pack
from tests.support.hash_tables import new_table
from tf_fusedrec import ops
from tf_fusedrec._tf_compat import tf

SEGMENTS, DIM, STEPS, HISTORIES = 2, 4, 60, 24


def random_options(random):
    """Returns options of the op and of the model; limits are lists by segment."""
    pick = lambda values: [values[random.integers(len(values))] for _ in range(SEGMENTS)]  # noqa: E731
    policies = [(0, "none"), (0, "none"), (24, "lfu"), (24, "lru")]
    chosen = pick(policies)
    return {
        "frequency_decay_steps": pick([0, 1, 3, 7, 16, 100]),
        "max_rows": [rows for rows, _ in chosen],
        "eviction": [policy for _, policy in chosen],
        "ttl": pick([0, 0, 5]),
        "hot_after": int(random.integers(0, 4)),
        "window": int(random.integers(1, 3)),
    }


def random_batch(random, step):
    """Ids of a hot set that moves on, from two sources by segment."""
    center = step // 12 * 20
    draw = lambda: (center + random.geometric(0.25, random.integers(0, 5))).tolist()  # noqa: E731
    return [[draw() for _ in range(SEGMENTS)] for _ in range(2)]


def table_of(options):
    return new_table(SEGMENTS, DIM, **options)


def gradients(random, received):
    return (random.integers(-8, 9, [len(received), DIM]) / 64).astype(np.float32)  # their sums are exact


def assert_same(table, oracle):
    assert table.statistics() == oracle.statistics()
    pools = np.zeros(2, int)
    for segment in range(SEGMENTS):
        ids, records = table.records(segment)
        want = oracle.export(segment)
        assert ids.tolist() == [i for i, _ in want]
        assert records["last"].tolist() == [row.last for _, row in want]
        assert records["count"].tolist() == [row.count for _, row in want]
        assert records["pool"].tolist() == [int(not row.hot) for _, row in want]
        np.testing.assert_array_equal(records["row"], np.reshape([row.numbers for _, row in want], [-1, DIM]))
        pools += np.bincount(records["pool"], minlength=2)
    assert ops.table_statistics(table.handle).bytes.numpy()[3:].tolist() == pools.tolist()


def hot_keys(oracle):
    return {(s, i) for s, rows in enumerate(oracle.rows) for i, row in rows.items() if row.hot and oracle.hot_after}


def run(seed):
    """Runs one history. Returns the number of demotions."""
    random = np.random.default_rng(seed)
    options = random_options(random)
    oracle = TableOracle(SEGMENTS, lambda key: table.initial(key), **options)
    demoted = 0
    with table_of(options) as table:
        waiting = []  # Updates come window - 1 lookups late.
        for step in range(1, STEPS + 1):
            batch = random_batch(random, step)
            message, splits, received = pack(batch)
            hot = hot_keys(oracle)
            try:
                want = oracle.lookup(received)
            except Exhausted:
                with pytest.raises(tf.errors.ResourceExhaustedError):
                    table.lookup(batch)
                continue
            demoted += sum(i in oracle.rows[s] for s, i in hot - hot_keys(oracle))
            found = table.lookup(batch)
            np.testing.assert_array_equal(found.rows[: len(received)], np.reshape(want, [-1, DIM]))
            waiting.append((found, received, gradients(random, received)))
            if len(waiting) == options["window"]:
                found, received, grads = waiting.pop(0)
                table.apply(found, grads, learning_rate=0.5, step=step)
                oracle.apply(received, grads, 1.0, 0.5)
            if step % 9 == 0:
                segment, count = int(random.integers(SEGMENTS)), int(random.integers(3))
                assert ops.table_evict(table.handle, segment, count) == oracle.evict(segment, count)
            other = random_batch(random, step)
            np.testing.assert_array_equal(
                table.find(other), np.reshape(oracle.find(pack(other)[2]), [-1, DIM]), err_msg=f"step {step}"
            )
            if step % 5 == 0:
                assert_same(table, oracle)
    return demoted


@pytest.mark.slow
def test_random_histories_agree_with_a_model_that_visits_every_row():
    demoted = [run(seed) for seed in range(HISTORIES)]
    assert sum(demoted) > 100 and sum(n > 0 for n in demoted) > HISTORIES / 3, "the case is too easy"


@pytest.mark.parametrize("decays", [False, True])
def test_a_hot_set_that_moves_on_leaves_few_float32_rows(decays):
    """A set of ids comes for 8 steps and never again. Counts at a halving add up to at most 2 * steps * B, to which the
    lookups since then add steps * B. So 3 * steps * B / hot_after rows can have been hot since their last turn, beside
    the rows of the last lookup.
    """
    sets, each, hot_after, steps = 100, 64, 4, 16
    wide, highest = [], 0
    with new_table(hot_after=hot_after, frequency_decay_steps=steps if decays else 0) as table:
        for step in range(sets * 8):
            first = step // 8 * each
            handles = table.lookup([[list(range(first, first + each))]]).handles.numpy()
            highest = max(highest, *handles[handles < 2**31].tolist(), 0)
            wide.append(int(ops.table_statistics(table.handle).bytes[3]))
        if not decays:
            assert wide[-1] == sets * each
            return
        assert each <= max(wide) <= (3 * steps // hot_after + 1) * each
        # 64 shards take rows 32 at a time. Rows that are not used again would be 6,400.
        assert highest < 64 * 32
        for step in range(2 * steps):
            table.lookup([[[-1 - step]]])
        assert int(ops.table_statistics(table.handle).bytes[3]) == 0
