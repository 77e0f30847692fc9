"""Jagged attention, forward and backward, against NumPy in float64 (jagged_attention_call.py says how near).

tests/ops/jagged_attention compares the ops with files of independent reference results.
"""

from __future__ import annotations

import numpy as np

from tests.cuda.checks.jagged_attention_call import Call, compare, gated_case, random_case
from tests.cuda.checks.jagged_attention_channels import (  # noqa: F401
    FUNCTIONS,
    check_channels_of_functions_of_time,
    check_channels_of_rows_of_all_lengths,
    check_channels_of_rows_with_fewer_queries_than_keys,
    check_channels_under_masks,
    check_channels_with_more_tiles_than_blocks,
    check_slices_of_columns,
)
from tests.oracles.jagged_attention import dropout_of


def check_rows_of_all_lengths(run):
    for type_ in (2, 1, 0):
        compare(run, type_, random_case([1, 63, 0, 64, 65], 2, 32, 32, seed=type_))
    compare(run, 2, random_case([], 1, 32, 32, bias=False))
    compare(run, 2, random_case([0, 0], 1, 32, 32, bias=False))


def check_sizes_of_heads(run):
    """Tests each size of tiles, heads that are padded to it, and keys and values of different size."""
    for type_, qk_dim, value_dim in ((2, 64, 64), (2, 48, 80), (2, 256, 256), (1, 25, 7), (0, 40, 17)):
        compare(run, type_, random_case([70], 1, qk_dim, value_dim, seed=qk_dim))


def check_masks(run):
    for seed, masks in enumerate((
        {}, {"attention_window": 9}, {"attention_window": 40, "min_full_length": 5}, {"contextual_length": 3},
        {"contextual_length": [4, 0, 9], "attention_window": 11, "min_full_length": 3, "target_group_size": 3},
        {"contextual_length": 2, "attention_window": 9, "global_window": 6},
    )):  # fmt: skip
        case = random_case([70, 5, 13], 1, 32, 32, seed=seed, targets=[7, 0, 13], **masks)
        case["scale"] = np.random.default_rng(seed).uniform(0.1, 1.0, 88)
        compare(run, 0 if seed >= 4 else 2, case)


def check_pairs_that_dropout_hides(run):
    for number in range(3):
        case = random_case([70, 0, 9], 2, 8, 12, seed=number, targets=[3, 0, 2], bias=number == 1)
        dropout = {"dropout": 1 / 3, "dropout_seed": -5 - number}
        compare(run, number, {**case, **dropout, **dropout_of(*dropout.values())})


def check_tiles_outside_a_semi_local_mask_are_not_computed(run):
    """Keys that no query sees are NaN: any product with them would show in the result."""
    case = random_case([300], 1, 32, 32, attention_window=20, global_window=10)
    case.update(query=case["query"][296:], asks=case["asks"][296:], query_splits=np.array([0, 4]))
    grads = np.random.default_rng(2).normal(size=[4, 1, 32])
    whole = [run.attention(0, case, given) for given in (None, grads)]
    for name in ("key", "value"):
        case[name][64:256] = np.nan
    for given, wanted in zip((None, grads), whole):
        for name, ours in run.attention(0, case, given).items():
            np.testing.assert_array_equal(ours, wanted[name], name)
    assert not np.any(whole[1]["key_grads"][64:256])


def check_functions_of_time(run):
    for seed, (function, parameters) in enumerate(FUNCTIONS.items(), 1):
        case = random_case([33, 5], 2, 24, 16, seed=seed)
        case.update(time=function, time_weights=parameters, thresholds=None)
        compare(run, seed % 3, case)
    compare(run, 0, case, [20, 1])


def check_rows_with_fewer_queries_than_keys(run):
    for seed, masks in enumerate((
        {"attention_window": 9}, {"contextual_length": [4, 0, 9, 0], "target_group_size": 3},
    )):  # fmt: skip
        case = random_case([70, 5, 40, 0], 2, 32, 32, seed=seed, targets=[7, 0, 3, 0], **masks)
        case["scale"] = np.random.default_rng(seed).uniform(0.1, 1.0, 115)
        compare(run, 0 if seed else 2, case, [33, 0, 40, 0])


def check_times_that_need_all_their_bits(run):
    case = random_case([40], 1, 32, 32)
    case["asks"][:3] = [-(2**62), 2**62, 0]
    case["answers"][:3] = [2**62, -(2**62), -1]
    case["thresholds"] = np.sort(np.concatenate([case["thresholds"][:17], [0, 2**61, 2**62]]))
    compare(run, 0, case)


def check_gate_and_norm(run):
    for number, options in enumerate((
        {"weights": False}, {}, {"per_head": True}, {"gate_first": True, "targets": [3, 0, 5]},
        {"gate_first": True, "per_head": True, "weights": False},
    )):  # fmt: skip
        compare(run, number % 3, gated_case([33, 0, 5], 2, 20, seed=number, bias=number == 1, **options))


def check_weights_of_the_norm_with_more_tokens_than_a_slot(run):
    compare(run, 0, gated_case([60, 70], 2, 4, bias=False))


def check_a_gate_of_fewer_queries_than_keys(run):
    compare(run, 0, gated_case([40, 9], 2, 8, bias=False), [33, 0])


def check_launcher_more_blocks_than_a_launch_has_are_refused(run):
    most = 2**31 - 1
    splits = np.array([0, 3, most])
    for changes in ({"heads": 64}, {"heads": 1, "channels": 1, "value_dim": 2**13}):
        call = Call(
            type=2, batch=2, tokens=most, queries=most, qk_dim=32, value_dim=32, target_group_size=1, time=1,
            query_splits=splits.ctypes.data, row_splits=splits.ctypes.data,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(call, name, value)
        assert run.answer("attention", call, run.allocator) == 1, changes
