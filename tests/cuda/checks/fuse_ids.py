"""Concatenation of ids and their bags against the oracle: ids exactly, scales to one rounding of a root."""

import ctypes

import numpy as np

from tests.oracles.fuse_ids import bags_oracle, fuse_ids_oracle

INVALID = 1  # cudaErrorInvalidValue
COMBINERS = ("sum", "mean", "sqrtn")
LEAST = np.iinfo(np.int64).min


class Feature(ctypes.Structure):
    """FusedrecFeature of fuse_ids_cuda.h."""

    _fields_ = [
        ("ids", ctypes.c_void_p), ("row_splits", ctypes.c_void_p), ("num_ids", ctypes.c_int64),
        ("num_splits", ctypes.c_int64), ("bag_size", ctypes.c_int64), ("combiner", ctypes.c_int64),
    ]  # fmt: skip


def fuse(kernels, features, row_splits, bag_sizes, combiners, bags):
    """Returns ids, bag_splits, bag_scale and the first feature with wrong row_splits."""
    memory = kernels.memory
    given, records = [], []
    for f, ids in enumerate(features):
        arrays = [memory.put(np.array(a, np.int64)) for a in (ids, row_splits.get(f, []))]
        given += arrays
        pointers = memory.pointer(arrays[0]), memory.pointer(arrays[1]) if f in row_splits else None
        sizes = len(ids), len(row_splits.get(f, [])), bag_sizes[f], COMBINERS.index(combiners[f])
        records.append(Feature(*pointers, *sizes))
    n = sum(map(len, features))
    out = memory.empty([n], np.int64), memory.empty([bags + 1], np.int64), memory.empty([bags], np.float32)
    wrong, count = np.full(1, -7, np.int32), len(records)
    scratch = kernels.scratch("fuse_ids", count)
    kernels.run("fuse_ids", (Feature * count)(*records), count, n, bags, scratch, *out, wrong)
    return *map(memory.get, out), wrong[0]


def compare(kernels, features, row_splits, bag_sizes, combiners):
    splits, scale, bags = bags_oracle(features, row_splits, bag_sizes, combiners)
    ids, our_splits, our_scale, wrong = fuse(kernels, features, row_splits, bag_sizes, combiners, bags.sum())
    assert wrong == -1
    np.testing.assert_array_equal(ids, fuse_ids_oracle(features, [0] * len(features), 1)[0])
    np.testing.assert_array_equal(our_splits, splits)
    np.testing.assert_allclose(our_scale, scale, rtol=1e-7)


def check_edge_cases(kernels):
    """No ids, no rows, empty features first, in the middle and last, the smallest id."""
    for features, row_splits, bag_sizes in (
        ([[]], {}, [1]),
        ([[]], {0: [0]}, [0]),
        ([[], [LEAST, 5, 7], [], [], [8], []], {1: [0, 0, 3, 3], 2: [0, 0], 3: [0]}, [2, 0, 1, 0, 1, 3]),
        ([[1, 2, 3, 4], [5, 6], [7]], {1: [0, 1, 2]}, [2, 1, 1]),
    ):
        compare(kernels, features, row_splits, bag_sizes, [COMBINERS[f % 3] for f in range(len(features))])


def check_random_features(kernels):
    """More ids and bags than a block has threads."""
    random = np.random.default_rng(0)
    for count in (1, 7):
        features, row_splits, bag_sizes = [], {}, []
        for f in range(count):
            bag_sizes.append(int(random.integers(0, 4)))
            lengths = random.integers(0, 5, random.integers(0, 400))
            ids = lengths.sum() if bag_sizes[f] == 0 else bag_sizes[f] * random.integers(0, 300)
            if bag_sizes[f] == 0:
                row_splits[f] = np.concatenate([[0], np.cumsum(lengths)]).tolist()
            features.append(random.integers(-(2**62), 2**62, ids).tolist())
        compare(kernels, features, row_splits, bag_sizes, [COMBINERS[k] for k in random.integers(0, 3, count)])


def check_wrong_row_splits_are_found(kernels):
    """The first feature is named, and no kernel follows its splits. Splits that bound no bag are checked, too."""
    for wrong in ([0, 3, 1, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 3], [0, LEAST, 2**62, 4]):
        rows = {0: [0, 1, 2, 4], 1: wrong, 2: [3, 3, 3, 3]}
        for sizes in ([0, 0, 0], [1, 1, 1]):
            bags = 9 if sizes[0] == 0 else 12
            assert fuse(kernels, [[1, 2, 3, 4]] * 3, rows, sizes, ["sqrtn"] * 3, bags)[-1] == 1, wrong


def check_bad_arguments_are_refused(kernels):
    """Sums that do not agree would write beyond the outputs."""
    for num_ids, num_splits, bag_size, combiner, n, bags in (
        (4, 0, 1, 0, 3, 4), (4, 0, 1, 0, 5, 4), (4, 0, 1, 0, 4, 3), (4, 0, 3, 0, 4, 1), (4, 0, 0, 0, 4, 0),
        (4, 0, -1, 0, 4, 4), (-1, 0, 1, 0, -1, -1), (2**31, 0, 1, 0, 2**31, 2**31), (4, 0, 1, 3, 4, 4),
    ):  # fmt: skip
        record = (Feature * 1)(Feature(None, None, num_ids, num_splits, bag_size, combiner))
        answer = kernels.answer("fuse_ids", record, 1, n, bags, None, None, None, None, np.zeros(1, np.int32))
        assert answer == INVALID, (num_ids, num_splits, bag_size, combiner, n, bags)
