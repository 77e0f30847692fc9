"""The channels of FuXi, forward and backward, against NumPy in float64."""

from __future__ import annotations

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.jagged_attention_call import assert_near, compare, random_case, to_bits
from tests.oracles.jagged_attention import bias_attention_grad

# With these parameters, the functions of time halve, roughly, over the times of random_case.
FUNCTIONS = {"power": [0.7, 0.1], "exponential": [-0.4, -14.0], "stretched": [0.6, -6.0, 0.3]}


def channels(lengths, heads, value_dim, *, function=None, **more):
    """Returns a case of both channels, with a function of time instead of buckets."""
    case = random_case(lengths, heads, 1, value_dim, **more)
    for name in ("query", "key", "scale", "alpha"):
        del case[name]
    if function:
        case.update(time=function, time_weights=FUNCTIONS[function], thresholds=None)
    return case


def without(case, part):
    """Returns the case without its position or time."""
    left = {key: array for key, array in case.items() if key != f"{part}_weights"}
    return left if part == "position" else {**left, "time": "none", "thresholds": None}


def check_channels_of_rows_with_fewer_queries_than_keys(run):
    for type_, function in ((0, None), (1, "exponential")):
        case = channels([70, 5, 40, 0], 2, 16, function=function, targets=[7, 0, 3, 0], attention_window=30)
        compare(run, type_, case, [69, 1, 3, 0])


def check_channels_of_rows_of_all_lengths(run):
    for type_ in (2, 1, 0):
        compare(run, type_, channels([1, 63, 0, 64, 65], 2, 16, seed=type_))
    compare(run, 2, channels([], 1, 32))
    compare(run, 2, channels([0, 0], 1, 32))
    compare(run, 2, channels([3], 2, 0))


@once
def check_slices_of_columns(run):
    """Slices hold columns of several heads, and heads span several slices, at every alignment."""
    for type_, heads, value_dim in ((2, 3, 72), (2, 1, 256), (1, 5, 27), (0, 1, 1), (0, 3, 44)):
        compare(run, type_, channels([40], heads, value_dim, seed=heads))


def check_channels_under_masks(run):
    for seed, masks in enumerate((
        {"attention_window": 40, "global_window": 5}, {"contextual_length": 3},
        {"contextual_length": [4, 0, 9], "attention_window": 11, "min_full_length": 3, "target_group_size": 3},
    )):  # fmt: skip
        function = (None, *FUNCTIONS)[seed]
        case = channels([70, 5, 13], 1, 16, seed=seed, targets=[7, 0, 13], function=function, **masks)
        compare(run, 0 if seed == 2 else 2, case)


@once
def check_channels_of_functions_of_time(run):
    """Tests each function with and without positions, a channel of buckets, one of positions, and 64-bit times."""
    for seed, function in enumerate(FUNCTIONS, 1):
        case = channels([33, 20], 1, 24, seed=seed, function=function)
        compare(run, 0, case)
        compare(run, seed % 3, without(case, "position"))
    case = channels([40], 2, 8)
    case["asks"][:3], case["answers"][:3] = [-(2**62), 2**62, 0], [2**62, -(2**62), -1]
    case["thresholds"] = np.sort(np.concatenate([case["thresholds"][:17], [0, 2**61, 2**62]]))
    compare(run, 0, without(case, "position"))
    compare(run, 0, without(case, "time"))
    case.update(time="power", time_weights=FUNCTIONS["power"], thresholds=None)
    compare(run, 0, case)


@once
def check_channels_with_more_tiles_than_blocks(run):
    """A block takes one tile after another. Its sums have equal bits in any order of blocks."""
    case = without(channels([2] * 515, 1, 2), "position")
    grads = np.random.default_rng(1).normal(size=case["value"].shape)
    wanted = bias_attention_grad(grads=to_bits(0, grads), **{**case, "value": to_bits(0, case["value"])})
    for name, array in run.attention(0, case, grads).items():
        assert_near(0, array, wanted[name], name, run.times_of_float32)
    case, grads = channels([70, 20], 2, 4), np.random.default_rng(1).normal(size=[90, 2, 8])
    once, again = (run.attention(2, case, grads) for _ in range(2))
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name], name)
