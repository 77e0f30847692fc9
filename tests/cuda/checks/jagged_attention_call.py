"""Calls of jagged attention and of its channels with NumPy arrays, and how near their results must come.

Tolerances, relative to the largest number of an array: 2^-6 for bfloat16 and 2^-9 for float16, two units in the last
place of a rounded number (inputs and weights are rounded, sums are not); 2e-6 for float32, some units in the last
place. Eight times that for the parameters of a function of time: each is one sum over all pairs, whose terms cancel.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, NamedTuple

import numpy as np

from tests.oracles import jagged_attention as oracle

TOLERANCE = {0: 2e-6, 1: 2.0**-9, 2: 2.0**-6}
TIMES = ("none", "buckets", "power", "exponential", "stretched")
TOKENS = ("query", "key", "value", "gate", "attended")
PARAMETERS = ("position_weights", "time_weights", "norm_weight", "norm_bias")  # float32 beside tokens of any type


def _fields(type_, *names):
    return [(name, type_) for name in names]


class Bias(ctypes.Structure):
    """RelativeBias of call.h."""

    _fields_ = [
        ("position_weights", c_void_p), ("max_length", c_int64), *_fields(c_int32, "time", "num_thresholds"),
        *_fields(c_void_p, "thresholds", "time_weights", "asks", "answers"),
    ]  # fmt: skip


class Call(ctypes.Structure):
    """AttentionCall of call.h."""

    _anonymous_ = ("bias",)
    _fields_ = [
        *_fields(c_int32, "type", "channels"),
        *_fields(c_int64, "batch", "tokens", "queries", "heads", "qk_dim", "value_dim"),
        *_fields(c_void_p, "row_splits", "query_splits", "num_targets", "contextual_lengths"),
        *_fields(c_int64, "target_group_size", "attention_window", "min_full_length", "global_window"),
        *_fields(c_uint32, "dropped", "pair_seed"), ("bias", Bias), ("alpha", c_float), ("scale_stride", c_int32),
        *_fields(c_void_p, "scale", "query", "key", "value", "gate", "norm_weight", "norm_bias"), ("epsilon", c_float),
        *_fields(c_int32, "per_head", "gate_first"),
        *_fields(c_void_p, "out", "gated", "grads", "query_grads", "key_grads", "value_grads", "gate_grads"),
        *_fields(c_void_p, "position_grads", "time_grads", "norm_weight_grads", "norm_bias_grads"),
    ]  # fmt: skip


def to_bits(type_, array):
    """Returns float32 numbers in the form that the kernels read."""
    array = np.asarray(array, np.float32)
    if type_ == 2:
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.astype(np.float16) if type_ == 1 else array


def from_bits(type_, array):
    if type_ == 2:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def rounded(type_, case):
    """Returns a case with the tokens that the kernels read."""
    return {**case, **{name: from_bits(type_, to_bits(type_, case[name])) for name in TOKENS if name in case}}


class Prepared(NamedTuple):
    """A launcher's call and its arrays."""

    launcher: str
    call: Call
    host: dict[str, np.ndarray]
    device: dict[str, Any]
    results: list[str]  # names of those in `device`


def prepare(memory, type_, case, grads=None):
    """Prepares attention, or the channels of a case without queries: for out, or with grads for the gradients."""
    masks, (tokens, heads, value_dim) = case.get("masks", {}), case["value"].shape
    host = {"row_splits": case["row_splits"], "query_splits": case.get("query_splits", case["row_splits"])}
    host.update({name: case[name] for name in ("num_targets", "thresholds") if case.get(name) is not None})
    context = masks.get("contextual_length", 0)
    if np.any(context):
        host["contextual_lengths"] = np.broadcast_to(context, [len(case["row_splits"]) - 1])
    host = {name: np.array(array, np.int64) for name, array in host.items()}
    call = Call(
        type=type_, batch=len(case["row_splits"]) - 1, tokens=tokens, queries=int(host["query_splits"][-1]),
        heads=heads, value_dim=value_dim, qk_dim=case["query"].shape[2] if "query" in case else 0,
        scale_stride=np.ndim(case.get("scale", 1.0)), alpha=case.get("alpha", 1.0),
        time=TIMES.index(case.get("time", "none")), num_thresholds=len(host.get("thresholds", ())),
        **{"target_group_size": 1, **{name: mask for name, mask in masks.items() if name != "contextual_length"}},
        **{name: case[name] for name in ("dropped", "pair_seed", "per_head", "gate_first", "epsilon") if name in case},
    )  # fmt: skip
    number = to_bits(type_, np.zeros(0)).dtype
    device = {"scale": memory.put(np.asarray(case.get("scale", 1.0), np.float32).reshape(-1))}
    device.update({name: memory.put(to_bits(type_, case[name])) for name in TOKENS[:4] if name in case})
    weights = [name for name in PARAMETERS if case.get(name) is not None]
    device.update({name: memory.put(np.asarray(case[name], np.float32)) for name in weights})
    call.max_length = (len(case.get("position_weights", ())) + 1) // 2
    if call.time:
        device.update({name: memory.put(np.asarray(case[name], np.int64)) for name in ("asks", "answers")})
    call.channels = 0 if "query" in case else ("position_weights" in weights) + ("time_weights" in weights)
    if grads is None:
        wanted = {"out": ([call.queries, heads, max(call.channels, 1) * value_dim], number)}
        if "gate" in case:
            wanted["gated"] = wanted["out"]
    else:
        device["grads"] = memory.put(to_bits(type_, grads))
        if "gate" in case:
            device["out"] = memory.put(to_bits(type_, case["attended"]))
        wanted = {f"{name}_grads": (case[name].shape, number) for name in TOKENS[:4] if name in case}
        wanted.update({f"{n.removesuffix('_weights')}_grads": ([len(case[n])], np.float32) for n in weights})
    device.update({name: memory.empty(*form) for name, form in wanted.items()})
    for name, array in host.items():
        setattr(call, name, array.ctypes.data)
    for name, array in device.items():
        setattr(call, name, memory.pointer(array).value)
    return Prepared("attention" if grads is None else "attention_grad", call, host, device, list(wanted))


def assert_near(type_, ours, wanted, what, times=1):
    assert np.all(np.isfinite(ours)), what
    error = np.max(np.abs(ours - wanted), initial=0.0) / max(np.max(np.abs(wanted), initial=0.0), 1e-9)
    assert error <= times * TOLERANCE[type_], f"{what}: error {error:.2e} of the largest number"


def compare(run, type_, case, queries=None):
    """Compares both passes with the oracle. queries: how many of the last tokens of each row ask; None: all.

    In the oracle every token asks, and those that do not have no gradient. `run` is as in checks/__init__.py.
    """
    splits = np.asarray(case["row_splits"])
    counts = np.diff(splits) if queries is None else np.asarray(queries, np.int64)
    ranges = [np.arange(end - count, end) for end, count in zip(splits[1:], counts)]
    asking = np.concatenate([np.empty(0, np.int64), *ranges])
    given = case
    if queries is not None:
        given = {**case, "query_splits": np.concatenate([[0], np.cumsum(counts)])}
        given.update({n: case[n][asking] for n in ("query", "scale", "asks", "gate") if np.ndim(case.get(n, 0)) > 0})
    exact, attends = rounded(type_, case), "query" in case
    out = (oracle.attention if attends else oracle.bias_attention)(**exact)
    found = run.attention(type_, given)
    near = lambda ours, wanted, name, times=1: assert_near(  # noqa: E731
        type_, ours, wanted, name, times * (run.times_of_float32 if type_ == 0 else 1)
    )
    near(found["out"], out[asking], "out")
    grads = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=out[asking].shape)))
    of_out, wanted = np.zeros(out.shape), {}
    of_out[asking] = grads
    if "gate" in case:
        # The kernel gates the attention that it has rounded.
        attended = found["out"].astype(np.float64)
        gated, wanted = oracle.gate(attended, grads=grads, **rounded(type_, given))
        given = {**given, "attended": attended}
        near(found["gated"], gated, "gated")
        of_out[asking] = from_bits(type_, to_bits(type_, wanted["attended_grads"]))
    wanted.update((oracle.attention_grad if attends else oracle.bias_attention_grad)(grads=of_out, **exact))
    for name, ours in run.attention(type_, given, grads).items():
        expected = wanted[name][asking] if name == "query_grads" else wanted[name]
        of_function = name == "time_grads" and case["time"] != "buckets"
        through_two = "gate" in case and type_ == 0
        near(ours, expected, name, 8 if of_function else 4 if through_two else 1)


def random_case(lengths, heads, qk_dim, value_dim, *, seed=0, targets=None, bias=True, **masks):
    """Returns the arguments of the oracle (tests/oracles/jagged_attention.py)."""
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
            position_weights=random.normal(size=2 * longest - 1), time_weights=random.normal(size=21), time="buckets",
            thresholds=np.floor(2.0 ** np.arange(20)).astype(np.int64),
            answers=np.concatenate([*answers, np.empty(0, np.int64)]).astype(np.int64),
            asks=np.concatenate([*asks, np.empty(0, np.int64)]).astype(np.int64),
        )  # fmt: skip
    return case


def gated_case(lengths, heads, dim, *, weights=True, per_head=False, gate_first=False, seed=0, **more):
    random = np.random.default_rng(seed)
    case = random_case(lengths, heads, dim, dim, seed=seed, **more)
    case.update(gate=random.normal(size=case["value"].shape), per_head=per_head, gate_first=gate_first, epsilon=1e-2)
    if weights:
        case.update({name: random.normal(size=heads * dim) for name in ("norm_weight", "norm_bias")})
    return case
