"""Initial rows against the oracle, which draws the same numbers with Python integers."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.launchers import DISTRIBUTIONS
from tests.oracles.initial_rows import initial_row_oracle

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
SEEDS = [12345678901234567, -42, 7]


def draw(ops, rows, exists, ids, splits, name, a=-1.0, b=3.0):
    return ops.initial_rows(rows, exists, ids, splits, np.resize(SEEDS, len(splits) - 1).tolist(), name, a, b)


def compare(ops, rows, exists, ids, splits, name, a=-1.0, b=3.0):
    wanted = rows.copy()
    for s, (begin, end) in enumerate(zip(splits, splits[1:])):
        for w in range(begin, end):
            if not exists[w]:
                wanted[w] = initial_row_oracle(name, a, b, SEEDS[s % 3], ids[w], rows.shape[1])
    # Both compute in double and round once; their last bits of a double may differ.
    np.testing.assert_allclose(draw(ops, rows, exists, ids, splits, name, a, b), wanted, rtol=1e-6)


def check_edge_cases(ops):
    """No rows, no columns, empty tables first, in the middle and last, extreme ids, columns beside blocks of four."""
    for name in DISTRIBUTIONS:
        for ids, splits in (([], [0, 0]), ([LEAST, 1, -1, MOST, 1], [0, 0, 3, 3, 5, 5]), ([5, 5], [0, 1, 2])):
            for dim in (0, 1, 4, 7):
                rows = np.arange(len(ids) * dim, dtype=np.float32).reshape(len(ids), dim)
                for present in (0, 1):
                    compare(ops, rows, [n == present for n in range(len(ids))], ids, splits, name)


@once
def check_more_rows_than_a_block_has_threads(ops):
    random = np.random.default_rng(0)
    ids, splits = random.integers(LEAST, MOST, 300), [0, 100, 250, 300]
    rows, exists = random.normal(size=[300, 9]).astype(np.float32), random.integers(0, 2, 300)
    compare(ops, rows, exists, ids, splits, "normal")


@once
def check_16_bit_rows_are_the_rounded_float_rows(ops):
    ids, splits, exists = np.arange(40), [0, 40], [0] * 40
    wide = draw(ops, np.zeros([40, 6], np.float32), exists, ids, splits, "normal")
    half = draw(ops, np.zeros([40, 6], np.float16), exists, ids, splits, "normal")
    np.testing.assert_array_equal(half, wide.astype(np.float16))
    brain = draw(ops, np.zeros([40, 6], np.uint16), exists, ids, splits, "normal")  # bits of bfloat16
    bits = wide.view(np.uint32)
    np.testing.assert_array_equal(brain, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))


@once
def check_launcher_without_memory(ops):
    ops.refuse_without_memory(lambda: draw(ops, np.ones([1, 2], np.float32), [0], [3], [0, 1], "normal"))
