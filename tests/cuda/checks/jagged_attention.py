"""Jagged attention, forward and backward, against NumPy in float64 and against files of independent reference results.

Tolerances, relative to the largest number of an array: 2^-6 for bfloat16 and 2^-9 for float16, two units in the last
place of a rounded number (inputs and weights are rounded, sums are not); 2e-6 for float32, some units in the last
place.
"""

from __future__ import annotations

import ctypes
import json

import numpy as np

from tests.cuda.checks.jagged_attention_oracle import attention, attention_grad, visible_pairs
from tests.support.shared import ROOT

TOLERANCE = {0: 2e-6, 1: 2.0**-9, 2: 2.0**-6}
_NUMBERS = [
    "type", "batch", "tokens", "heads", "qk_dim", "value_dim", "contextual_length", "attention_window",
    "min_full_length", "scale_stride", "max_length", "num_thresholds",
]  # fmt: skip
_POINTERS = [
    "row_splits", "num_targets", "thresholds", "query", "key", "value", "scale", "position_weights", "time_weights",
    "asks", "answers", "out", "grads", "query_grads", "key_grads", "value_grads", "position_grads", "time_grads",
]  # fmt: skip


class Call(ctypes.Structure):
    """FusedrecAttention of jagged_attention_cuda.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS), ("alpha", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]  # fmt: skip


def to_bits(type_, array):
    """float32 numbers as the kernels read them."""
    array = np.asarray(array, np.float32)
    if type_ == 2:
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(np.float16) if type_ == 1 else array


def from_bits(type_, array):
    if type_ == 2:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def run(kernels, type_, case, grads=None):
    """out, or with grads the gradients of query, key, value, position_weights, time_weights."""
    memory = kernels.memory
    tokens, heads, qk_dim = case["query"].shape
    value_dim, masks = case["value"].shape[2], case.get("masks", {})
    host = {"row_splits": np.asarray(case["row_splits"], np.int64)}
    if case.get("num_targets") is not None:
        host["num_targets"] = np.asarray(case["num_targets"], np.int64)
    device = {name: memory.put(to_bits(type_, case[name])) for name in ("query", "key", "value")}
    device["scale"] = memory.put(np.asarray(case["scale"], np.float32).reshape(-1))
    call = Call(
        type=type_, batch=len(case["row_splits"]) - 1, tokens=tokens, heads=heads, qk_dim=qk_dim, value_dim=value_dim,
        scale_stride=int(np.ndim(case["scale"]) == 1), num_thresholds=-1, alpha=case.get("alpha", 1.0),
        contextual_length=masks.get("contextual_length", 0), attention_window=masks.get("attention_window", 0),
        min_full_length=masks.get("min_full_length", 0),
    )  # fmt: skip
    wanted, number = {}, to_bits(type_, np.zeros(0)).dtype
    if case.get("position_weights") is not None:
        device["position_weights"] = memory.put(np.asarray(case["position_weights"], np.float32))
        call.max_length = (len(case["position_weights"]) + 1) // 2
        wanted["position_grads"] = ([len(case["position_weights"])], np.float32)
    if case.get("time_weights") is not None:
        device.update({name: memory.put(np.asarray(case[name], np.int64)) for name in ("asks", "answers")})
        device["time_weights"] = memory.put(np.asarray(case["time_weights"], np.float32))
        host["thresholds"] = np.asarray(case["thresholds"], np.int64)
        call.num_thresholds = len(case["thresholds"])
        wanted["time_grads"] = ([len(case["time_weights"])], np.float32)
    if grads is None:
        wanted = {"out": (case["value"].shape, number)}
    else:
        device["grads"] = memory.put(to_bits(type_, grads))
        wanted = {f"{name}_grads": (case[name].shape, number) for name in ("query", "key", "value")} | wanted
    device.update({name: memory.empty(*form) for name, form in wanted.items()})
    for name, array in host.items():
        setattr(call, name, array.ctypes.data)
    for name, array in device.items():
        setattr(call, name, memory.pointer(array).value)
    scratch = memory.empty([kernels.count("jagged_attention_scratch_bytes", call)], np.uint8)
    kernels.run("jagged_attention" + ("" if grads is None else "_grad"), call, scratch)
    results = {name: memory.get(device[name]) for name in wanted}
    return {name: x if x.dtype == np.float32 else from_bits(type_, x) for name, x in results.items()}


def assert_near(type_, ours, wanted, what):
    assert np.all(np.isfinite(ours)), what
    error = np.max(np.abs(ours - wanted), initial=0.0) / max(np.max(np.abs(wanted), initial=0.0), 1e-9)
    assert error <= TOLERANCE[type_], f"{what}: error {error:.2e} of the largest number"


def compare(kernels, type_, case, backward=True):
    rounded = {name: from_bits(type_, to_bits(type_, case[name])) for name in ("query", "key", "value")}
    exact = {**case, **rounded}
    out = attention(**exact)
    assert_near(type_, run(kernels, type_, case)["out"], out, "out")
    if not backward:
        return
    grads = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=out.shape)))
    wanted = attention_grad(grads=grads, **exact)
    for name, ours in run(kernels, type_, case, grads).items():
        assert_near(type_, ours, wanted[name], name)


def random_case(lengths, heads, qk_dim, value_dim, *, seed=0, targets=None, bias=True, **masks):
    random = np.random.default_rng(seed)
    tokens, longest = sum(lengths), max(max(lengths, default=1), 1)
    case = {
        "query": random.normal(size=[tokens, heads, qk_dim]), "key": random.normal(size=[tokens, heads, qk_dim]),
        "value": random.normal(size=[tokens, heads, value_dim]), "alpha": qk_dim**-0.5, "scale": 1.0 / longest,
        "row_splits": np.concatenate([[0], np.cumsum(lengths)]), "num_targets": targets, "masks": masks,
    }  # fmt: skip
    if bias:
        answers = [1_000_000 + np.cumsum(random.integers(0, 400, n) ** 2) for n in lengths]
        asks = [np.concatenate([a[1:], a[-1:]]) for a in answers]
        case.update(
            position_weights=random.normal(size=2 * longest - 1), time_weights=random.normal(size=21),
            thresholds=np.floor(2.0 ** np.arange(20)).astype(np.int64),
            answers=np.concatenate([*answers, np.empty(0, np.int64)]).astype(np.int64),
            asks=np.concatenate([*asks, np.empty(0, np.int64)]).astype(np.int64),
        )  # fmt: skip
    return case


def check_rows_of_all_lengths(kernels):
    for type_ in (2, 1, 0):
        compare(kernels, type_, random_case([1, 63, 0, 64, 65], 2, 32, 32, seed=type_))
    compare(kernels, 2, random_case([], 1, 32, 32, bias=False))
    compare(kernels, 2, random_case([0, 0], 1, 32, 32, bias=False))


def check_sizes_of_heads(kernels):
    """Each size of tiles, and heads that are padded to it, keys and values of unlike size."""
    for type_, qk_dim, value_dim in ((2, 64, 64), (2, 48, 80), (2, 256, 256), (1, 25, 7), (0, 40, 17)):
        compare(kernels, type_, random_case([70], 1, qk_dim, value_dim, seed=qk_dim))


def check_masks(kernels):
    for seed, masks in enumerate((
        {}, {"attention_window": 9}, {"attention_window": 40, "min_full_length": 5}, {"contextual_length": 3},
        {"contextual_length": 4, "attention_window": 11, "min_full_length": 3},
    )):  # fmt: skip
        case = random_case([70, 5, 13], 1, 32, 32, seed=seed, targets=[7, 0, 13], **masks)
        case["scale"] = np.random.default_rng(seed).uniform(0.1, 1.0, 88)
        compare(kernels, 0 if seed == 4 else 2, case)


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
    ):  # fmt: skip
        assert answer(**changes) == 1, changes


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
    assert_near(0, run(kernels, 0, case)["out"], arrays["out"].reshape(case["value"].shape), path.name)
    grads = run(kernels, 0, case, arrays["dout"].reshape(case["value"].shape))
    names = {"query_grads": "dq", "key_grads": "dk", "value_grads": "dv", "position_grads": "d_pos_w"}
    for name, ours in grads.items():
        wanted = arrays[names.get(name, "d_ts_w")].reshape(ours.shape)
        error = np.max(np.abs(ours - wanted))  # the reference is float32, too; its own tolerance
        assert error <= 1e-5 + 1.3e-6 * np.max(np.abs(wanted)), f"{path.name} {name}: {error:.2e}"


def log_thresholds(count):
    """Differences from which trunc(log(difference) / 0.301) is 1, 2, ..., count; found near exp(0.301 g)."""
    found = []
    for g in range(1, count + 1):
        near = int(np.exp(0.301 * g)) + np.arange(-2, 3)
        near = near[near > 0]
        reached = near[np.trunc(np.log(near.astype(np.float64)) / 0.301) >= g]
        found.append(reached[0] if len(reached) else near[-1])  # so large that no time of a file comes near it
    return np.array(found, np.int64)


def check_the_masks_of_the_oracle(_):
    """The picture of three pairs, by hand: a window of one, one target."""
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(visible_pairs(4, 1, attention_window=1), np.array(expected, bool))
