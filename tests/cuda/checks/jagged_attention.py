"""Jagged attention, forward and backward, against NumPy in float64 and against files of independent reference results.

(jagged_attention_call.py says how near.)
"""

from __future__ import annotations

import json

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.jagged_attention_call import (
    Call,
    assert_near,
    compare,
    compare_fewer_queries,
    log_thresholds,
    random_case,
    run,
)
from tests.cuda.checks.jagged_attention_channels import (  # noqa: F401
    FUNCTIONS,
    check_bad_arguments_of_channels_are_refused,
    check_channels_of_functions_of_time,
    check_channels_of_rows_of_all_lengths,
    check_channels_of_rows_with_fewer_queries_than_keys,
    check_channels_under_masks,
    check_channels_with_more_tiles_than_blocks,
    check_slices_of_columns,
)
from tests.cuda.checks.jagged_attention_fuxi import check_blocks_of_fuxi  # noqa: F401
from tests.cuda.checks.jagged_attention_gate import (  # noqa: F401
    check_a_gate_of_fewer_queries_than_keys,
    check_gate_and_norm,
    check_weights_of_the_norm_with_more_tokens_than_a_slot,
)
from tests.cuda.checks.jagged_attention_oracle import visible_pairs
from tests.support.shared import ROOT


def check_rows_of_all_lengths(kernels):
    for type_ in (2, 1, 0):
        compare(kernels, type_, random_case([1, 63, 0, 64, 65], 2, 32, 32, seed=type_))
    compare(kernels, 2, random_case([], 1, 32, 32, bias=False))
    compare(kernels, 2, random_case([0, 0], 1, 32, 32, bias=False))


def check_sizes_of_heads(kernels):
    """Tests each size of tiles, heads that are padded to it, and keys and values of different size."""
    for type_, qk_dim, value_dim in ((2, 64, 64), (2, 48, 80), (2, 256, 256), (1, 25, 7), (0, 40, 17)):
        compare(kernels, type_, random_case([70], 1, qk_dim, value_dim, seed=qk_dim))


def check_masks(kernels):
    for seed, masks in enumerate((
        {}, {"attention_window": 9}, {"attention_window": 40, "min_full_length": 5}, {"contextual_length": 3},
        {"contextual_length": [4, 0, 9], "attention_window": 11, "min_full_length": 3, "target_group_size": 3},
        {"contextual_length": 2, "attention_window": 9, "global_window": 6},
    )):  # fmt: skip
        case = random_case([70, 5, 13], 1, 32, 32, seed=seed, targets=[7, 0, 13], **masks)
        case["scale"] = np.random.default_rng(seed).uniform(0.1, 1.0, 88)
        compare(kernels, 0 if seed >= 4 else 2, case)


def check_pairs_that_dropout_hides(kernels):
    for number in range(3):
        case = random_case([70, 0, 9], 2, 8, 12, seed=number, targets=[3, 0, 2], bias=number == 1)
        compare(kernels, number, {**case, "dropped": 2**31 // 3, "pair_seed": 2**32 - 5 - number})


def check_tiles_outside_a_semi_local_mask_are_not_computed(kernels):
    """Keys that no query sees are NaN: any product with them would show in the result."""
    case = random_case([300], 1, 32, 32, attention_window=20, global_window=10)
    case.update(query=case["query"][296:], asks=case["asks"][296:], query_splits=np.array([0, 4]))
    grads = np.random.default_rng(2).normal(size=[4, 1, 32])
    whole = [run(kernels, "jagged_attention", 0, case, given) for given in (None, grads)]
    for name in ("key", "value"):
        case[name][64:256] = np.nan
    for given, wanted in zip((None, grads), whole):
        for name, ours in run(kernels, "jagged_attention", 0, case, given).items():
            np.testing.assert_array_equal(ours, wanted[name], name)
    assert not np.any(whole[1]["key_grads"][64:256])


def check_functions_of_time(kernels):
    for function, parameters in FUNCTIONS.items():
        case = random_case([33, 5], 2, 24, 16, seed=function)
        case.update(time_function=function, time_weights=parameters)
        compare(kernels, function % 3, case)
    compare_fewer_queries(kernels, 0, case, [20, 1])


def check_rows_with_fewer_queries_than_keys(kernels):
    for seed, masks in enumerate((
        {"attention_window": 9}, {"contextual_length": [4, 0, 9, 0], "target_group_size": 3},
    )):  # fmt: skip
        case = random_case([70, 5, 40, 0], 2, 32, 32, seed=seed, targets=[7, 0, 3, 0], **masks)
        case["scale"] = np.random.default_rng(seed).uniform(0.1, 1.0, 115)
        compare_fewer_queries(kernels, 0 if seed else 2, case, [33, 0, 40, 0])


def check_times_that_need_all_their_bits(kernels):
    case = random_case([40], 1, 32, 32)
    case["asks"][:3] = [-(2**62), 2**62, 0]
    case["answers"][:3] = [2**62, -(2**62), -1]
    case["thresholds"] = np.sort(np.concatenate([case["thresholds"][:17], [0, 2**61, 2**62]]))
    compare(kernels, 0, case)


def check_bad_arguments_are_refused(kernels):
    def answer(**changes):
        splits, targets = np.array([0, 3, 7]), np.array([1, 2])
        thresholds = np.array(changes.pop("thresholds", [1, 2, 3]), np.int64)
        splits[:] = changes.pop("splits", splits)
        call = Call(type=2, batch=2, tokens=7, heads=1, qk_dim=32, value_dim=32, num_thresholds=len(thresholds))
        call.row_splits, call.num_targets, call.thresholds = (x.ctypes.data for x in (splits, targets, thresholds))
        for name, value in changes.items():
            setattr(call, name, value)
        return kernels.answer("jagged_attention", call, None)

    for changes in (
        {"splits": [0, 5, 4]}, {"tokens": 8}, {"qk_dim": 257}, {"value_dim": 257}, {"thresholds": [2, 1, 3]},
        {"max_length": 3}, {"type": 3}, {"num_thresholds": 4097}, {"heads": 0}, {"tokens": 2**31},
        {"qk_dim": -1}, {"num_thresholds": -2}, {"time_function": 1}, {"global_window": -1},
        {"time_function": 4, "num_thresholds": -1},
        {"tokens": 2**31 - 1, "splits": [0, 3, 2**31 - 1], "heads": 64},  # blocks
    ):  # fmt: skip
        assert answer(**changes) == 1, changes


@once
def check_files_of_reference_results(kernels):
    folder = ROOT.parent / "shared/oracle/hstu"
    names = (
        "attn_causal", "attn_targets", "attn_context", "attn_context_targets", "attn_window", "attn_window_minfull",
        "attn_context_window_targets", "attn_rab_pos", "attn_rab_time_log", "attn_rab_all_log", "attn_rab_all_sqrt60",
    )  # fmt: skip
    if not folder.exists():
        print("jagged_attention: skipped the files of reference results: ../shared/oracle/hstu is not there")
        return
    for name in names:
        compare_file(kernels, folder / f"{name}.npz")


def compare_file(kernels, path):
    arrays = dict(np.load(path))
    settings = json.loads(bytes(arrays.pop("meta_json")))
    splits, heads = arrays["seq_offsets"], settings.get("heads", 2)
    lengths, kind = np.diff(splits), settings.get("bias_type")
    case = {name: arrays[name[0]].reshape(splits[-1], heads, -1) for name in ("query", "key", "value")}
    case.update(
        row_splits=splits, num_targets=arrays.get("num_targets"), alpha=settings["alpha"],
        scale=1.0 / settings.get("scaling_seqlen", settings.get("max_seq_len", settings.get("n"))),
        masks={
            "contextual_length": settings.get("contextual_seq_len", 0),
            "attention_window": settings.get("max_attn_len", 0),
            "min_full_length": settings.get("min_full_attn_seq_len", 0),
        },
    )  # fmt: skip
    if kind in ("ALL", "POS"):
        case["position_weights"] = arrays["pos_w"]
    if kind in ("ALL", "TIME"):
        stamps = np.concatenate([arrays["timestamps"], arrays["timestamps"][:, -1:]], axis=1)
        case["answers"] = np.concatenate([row[:n] for row, n in zip(stamps, lengths)])
        case["asks"] = np.concatenate([row[1 : n + 1] for row, n in zip(stamps, lengths)])
        case["time_weights"], buckets = arrays["ts_w"], len(arrays["ts_w"]) - 1
        if settings.get("bucket_function") == "sqrt":
            case["thresholds"] = 60 * np.arange(1, buckets + 1, dtype=np.int64) ** 2
        else:  # the first difference whose trunc(log(difference) / 0.301) is g
            case["thresholds"] = log_thresholds(buckets)
    assert_near(
        0, run(kernels, "jagged_attention", 0, case)["out"], arrays["out"].reshape(case["value"].shape), path.name
    )
    grads = run(kernels, "jagged_attention", 0, case, arrays["dout"].reshape(case["value"].shape))
    names = {"query_grads": "dq", "key_grads": "dk", "value_grads": "dv", "position_grads": "d_pos_w"}
    for name, ours in grads.items():
        wanted = arrays[names.get(name, "d_ts_w")].reshape(ours.shape)
        error = np.max(np.abs(ours - wanted))  # the reference is float32, too; its own tolerance
        assert error <= 1e-5 + 1.3e-6 * np.max(np.abs(wanted)), f"{path.name} {name}: {error:.2e}"


def check_the_masks_of_the_oracle(_):
    """Compares the mask of a window of one and one target with a drawing by hand."""
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(visible_pairs(4, 1, attention_window=1), np.array(expected, bool))
