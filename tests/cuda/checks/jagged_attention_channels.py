"""The channels of FuXi, forward and backward, against NumPy in float64."""

from __future__ import annotations

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.jagged_attention_call import (
    Call,
    assert_near,
    compare,
    compare_fewer_queries,
    random_case,
    run,
    to_bits,
)
from tests.cuda.checks.jagged_attention_oracle import bias_attention_grad

# With these parameters, the functions of time halve, roughly, over the times of random_case.
FUNCTIONS = {1: [0.7, 0.1], 2: [-0.4, -14.0], 3: [0.6, -6.0, 0.3]}


def channels(lengths, heads, value_dim, *, function=0, **more):
    """Returns a case of both channels, with a function of time instead of buckets."""
    case = random_case(lengths, heads, 1, value_dim, **more)
    for name in ("query", "key", "scale", "alpha"):
        del case[name]
    if function:
        case.update(time_function=function, time_weights=FUNCTIONS[function], thresholds=None)
    return case


def without(case, name):
    return {key: array for key, array in case.items() if key != name}


def check_channels_of_rows_with_fewer_queries_than_keys(kernels):
    for type_, function in ((0, 0), (1, 2)):
        case = channels([70, 5, 40, 0], 2, 16, function=function, targets=[7, 0, 3, 0], attention_window=30)
        compare_fewer_queries(kernels, type_, case, [69, 1, 3, 0], "bias_attention")


def check_channels_of_rows_of_all_lengths(kernels):
    for type_ in (2, 1, 0):
        compare(kernels, type_, channels([1, 63, 0, 64, 65], 2, 16, seed=type_), "bias_attention")
    compare(kernels, 2, channels([], 1, 32), "bias_attention")
    compare(kernels, 2, channels([0, 0], 1, 32), "bias_attention")
    compare(kernels, 2, channels([3], 2, 0), "bias_attention")


@once
def check_slices_of_columns(kernels):
    """Slices hold columns of several heads, and heads span several slices, at every alignment."""
    for type_, heads, value_dim in ((2, 3, 72), (2, 1, 256), (1, 5, 27), (0, 1, 1), (0, 3, 44)):
        compare(kernels, type_, channels([40], heads, value_dim, seed=heads), "bias_attention")


def check_channels_under_masks(kernels):
    for seed, masks in enumerate((
        {"attention_window": 40, "global_window": 5}, {"contextual_length": 3},
        {"contextual_length": [4, 0, 9], "attention_window": 11, "min_full_length": 3, "target_group_size": 3},
    )):  # fmt: skip
        case = channels([70, 5, 13], 1, 16, seed=seed, targets=[7, 0, 13], function=seed, **masks)
        compare(kernels, 0 if seed == 2 else 2, case, "bias_attention")


@once
def check_channels_of_functions_of_time(kernels):
    """Tests each function with and without positions, a channel of buckets, one of positions, and 64-bit times."""
    for function in FUNCTIONS:
        case = channels([33, 20], 1, 24, seed=function, function=function)
        compare(kernels, 0, case, "bias_attention")
        compare(kernels, function % 3, without(case, "position_weights"), "bias_attention")
    case = channels([40], 2, 8)
    case["asks"][:3], case["answers"][:3] = [-(2**62), 2**62, 0], [2**62, -(2**62), -1]
    case["thresholds"] = np.sort(np.concatenate([case["thresholds"][:17], [0, 2**61, 2**62]]))
    compare(kernels, 0, without(case, "position_weights"), "bias_attention")
    compare(kernels, 0, without(case, "time_weights"), "bias_attention")
    case.update(time_function=1, time_weights=FUNCTIONS[1])
    compare(kernels, 0, case, "bias_attention")


@once
def check_channels_with_more_tiles_than_blocks(kernels):
    """A block takes one tile after another. Its sums have equal bits in any order of blocks."""
    case = without(channels([2] * 515, 1, 2), "position_weights")
    grads = np.random.default_rng(1).normal(size=case["value"].shape)
    wanted = bias_attention_grad(grads=to_bits(0, grads), **{**case, "value": to_bits(0, case["value"])})
    for name, array in run(kernels, "bias_attention", 0, case, grads).items():
        assert_near(0, array, wanted[name], name)
    case, grads = channels([70, 20], 2, 4), np.random.default_rng(1).normal(size=[90, 2, 8])
    once, again = (run(kernels, "bias_attention", 2, case, grads) for _ in range(2))
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name], name)


def check_bad_arguments_of_channels_are_refused(kernels):
    def answer(**changes):
        splits = np.array(changes.pop("splits", [0, 3, 7]))
        thresholds = np.array(changes.pop("thresholds", [1, 2, 3]), np.int64)
        call = Call(type=2, batch=2, tokens=7, heads=1, value_dim=300, num_thresholds=len(thresholds))
        call.row_splits, call.thresholds = splits.ctypes.data, thresholds.ctypes.data
        for name, value in changes.items():
            setattr(call, name, value)
        return kernels.answer("bias_attention", call, None)

    for changes in (
        {"splits": [0, 5, 4]}, {"tokens": 8}, {"thresholds": [2, 1, 3]}, {"max_length": 3}, {"type": 3}, {"heads": 0},
        {"heads": 2**62}, {"value_dim": 2**31}, {"value_dim": -1}, {"time_function": 1}, {"tokens": 2**31},
        {"time_function": 4, "num_thresholds": -1}, {"time_function": -1, "num_thresholds": -1}, {"batch": -1},
        {"num_thresholds": -2}, {"tokens": -1}, {"max_length": -1}, {"attention_window": -1},
        {"tokens": 2**31 - 1, "splits": [0, 3, 2**31 - 1], "value_dim": 2**13},  # blocks
    ):  # fmt: skip
        assert answer(**changes) == 1, changes
