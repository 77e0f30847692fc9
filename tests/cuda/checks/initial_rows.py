"""Initial rows against the oracle, which draws the same numbers with Python integers."""

import numpy as np

from tests.cuda.checks import once
from tests.oracles.initial_rows import initial_row_oracle

INVALID = 1  # cudaErrorInvalidValue
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
NAMES = ("constant", "uniform", "normal", "truncated_normal")
FLOAT, HALF, BFLOAT16 = range(3)
SEEDS = [12345678901234567, -42, 7]


def draw(kernels, rows, exists, ids, splits, name, a=-1.0, b=3.0, type_=FLOAT, in_place=False):
    memory, dim = kernels.memory, rows.shape[1]
    given = memory.put(rows)
    out = given if in_place else memory.empty(rows.shape, rows.dtype)
    seeds = np.resize(SEEDS, len(splits) - 1)
    kernels.run(
        "initial_rows", type_, given, memory.put(np.array(exists, np.uint8)), memory.put(np.array(ids, np.int64)),
        np.array(splits, np.int64), seeds, len(ids), len(seeds), dim, NAMES.index(name), a, b,
        kernels.scratch("initial_rows", len(seeds)), out,
    )  # fmt: skip
    return memory.get(out)


def wanted(rows, exists, ids, splits, name, a=-1.0, b=3.0):
    out = rows.copy()
    for s, (begin, end) in enumerate(zip(splits, splits[1:])):
        for w in range(begin, end):
            if not exists[w]:
                out[w] = initial_row_oracle(name, a, b, SEEDS[s % 3], ids[w], rows.shape[1])
    return out


def check_edge_cases(kernels):
    """No rows, no columns, empty tables first, in the middle and last, extreme ids, columns beside blocks of four."""
    for name in NAMES:
        for ids, splits in (([], [0, 0]), ([LEAST, 1, -1, MOST, 1], [0, 0, 3, 3, 5, 5]), ([5, 5], [0, 1, 2])):
            for dim in (0, 1, 4, 7):
                rows = np.arange(len(ids) * dim, dtype=np.float32).reshape(len(ids), dim)
                exists = [n == 1 for n in range(len(ids))]
                for in_place in (False, True):
                    got = draw(kernels, rows, exists, ids, splits, name, in_place=in_place)
                    # Both compute in double and round once; their last bits of a double may differ.
                    np.testing.assert_allclose(got, wanted(rows, exists, ids, splits, name), rtol=1e-6)


@once
def check_more_rows_than_a_block_has_threads(kernels):
    random = np.random.default_rng(0)
    ids, splits = random.integers(LEAST, MOST, 300), [0, 100, 250, 300]
    rows, exists = random.normal(size=[300, 9]).astype(np.float32), random.integers(0, 2, 300)
    got = draw(kernels, rows, exists, ids, splits, "normal")
    np.testing.assert_allclose(got, wanted(rows, exists, ids, splits, "normal"), rtol=1e-6)
    np.testing.assert_array_equal(got[exists == 1], rows[exists == 1])


@once
def check_16_bit_rows_are_the_rounded_float_rows(kernels):
    ids, splits, exists = np.arange(40), [0, 40], [0] * 40
    wide = draw(kernels, np.zeros([40, 6], np.float32), exists, ids, splits, "normal")
    half = draw(kernels, np.zeros([40, 6], np.float16), exists, ids, splits, "normal", type_=HALF)
    np.testing.assert_array_equal(half, wide.astype(np.float16))
    brain = draw(kernels, np.zeros([40, 6], np.uint16), exists, ids, splits, "normal", type_=BFLOAT16)
    bits = wide.view(np.uint32)
    np.testing.assert_array_equal(brain, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))


@once
def check_bad_arguments_are_refused(kernels):
    for type_, splits, num_ids, dim, distribution in (
        (3, [0, 4], 4, 1, 0), (-1, [0, 4], 4, 1, 0), (0, [0, 3], 4, 1, 0), (0, [0, 4, 2, 4], 4, 1, 0),
        (0, [0, -1], -1, 1, 0), (0, [0, 2**31], 2**31, 1, 0), (0, [0, 4], 4, 2**31, 0), (0, [0, 4], 4, -1, 0),
        (0, [0, 4], 4, 1, 4), (0, [0, 4], 4, 1, -1),
    ):  # fmt: skip
        arrays = None, None, None, np.array(splits), np.zeros(3, np.int64)
        answer = kernels.answer(
            "initial_rows", type_, *arrays, num_ids, len(splits) - 1, dim, distribution, 0.0, 1.0, None, None
        )
        assert answer == INVALID, (type_, splits, num_ids, dim, distribution)
