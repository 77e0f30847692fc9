"""Concatenation of ids and their bags against the oracle: ids exactly, scales to one rounding of a root."""

import numpy as np

from tests.cuda.checks import once
from tests.cuda.launchers import COMBINERS, Refused
from tests.oracles.fuse_ids import bags_oracle, fuse_ids_oracle

LEAST = np.iinfo(np.int64).min


def compare(ops, features, row_splits, bag_sizes, combiners):
    splits, scale, _ = bags_oracle(features, row_splits, bag_sizes, combiners)
    ids, our_splits, our_scale = ops.fuse_ids(features, row_splits, bag_sizes, combiners)
    np.testing.assert_array_equal(ids, fuse_ids_oracle(features, [0] * len(features), 1)[0])
    np.testing.assert_array_equal(our_splits, splits)
    np.testing.assert_allclose(our_scale, scale, rtol=1e-7)


def check_edge_cases(ops):
    """No ids, no rows, empty features first, in the middle and last, the smallest id."""
    for features, row_splits, bag_sizes in (
        ([[]], {}, [1]),
        ([[]], {0: [0]}, [0]),
        ([[], [LEAST, 5, 7], [], [], [8], []], {1: [0, 0, 3, 3], 2: [0, 0], 3: [0]}, [2, 0, 1, 0, 1, 3]),
        ([[1, 2, 3, 4], [5, 6], [7]], {1: [0, 1, 2]}, [2, 1, 1]),
        ([[1, 2, 3, 4], [5, 6], []], {}, [2, 1, 3]),
        ([[1, 2, 3], [4]], {0: [0, 0, 2, 3], 1: [0, 1]}, [0, 0]),
    ):
        for first in range(3):
            combiners = [COMBINERS[(first + f) % 3] for f in range(len(features))]
            compare(ops, features, row_splits, bag_sizes, combiners)


def check_random_features(ops):
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
        compare(ops, features, row_splits, bag_sizes, [COMBINERS[k] for k in random.integers(0, 3, count)])


def check_launcher_finds_wrong_row_splits(ops):
    """The first feature is named, and no kernel follows its splits. Splits that bound no bag are checked, too."""
    for wrong in ([0, 3, 1, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 3], [0, LEAST, 2**62, 4]):
        for sizes in ([0, 0, 0], [1, 1, 1]):
            try:
                ops.fuse_ids([[1, 2, 3, 4]] * 3, {0: [0, 1, 2, 4], 1: wrong, 2: [3, 3, 3, 3]}, sizes, ["sqrtn"] * 3)
            except Refused as refusal:
                assert refusal.args == (1,), wrong
            else:
                raise AssertionError(f"{wrong} was not refused")


@once
def check_launcher_without_memory(ops):
    ops.refuse_without_memory(lambda: ops.fuse_ids([[1]], {}, [1], ["sum"]))
