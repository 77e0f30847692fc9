"""Calls of jagged attention and of its channels with NumPy arrays, and how near their results must come.

Tolerances, relative to the largest number of an array: 2^-6 for bfloat16 and 2^-9 for float16, two units in the last
place of a rounded number (inputs and weights are rounded, sums are not); 2e-6 for float32, some units in the last
place. Eight times that for the parameters of a function of time: each is one sum over all pairs, whose terms cancel.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from tests.cuda.checks.jagged_attention_oracle import attention, attention_grad, bias_attention, bias_attention_grad

TOLERANCE = {0: 2e-6, 1: 2.0**-9, 2: 2.0**-6}
_NUMBERS = [
    "type", "batch", "tokens", "heads", "qk_dim", "value_dim", "target_group_size", "attention_window",
    "min_full_length", "global_window", "scale_stride", "max_length", "num_thresholds", "per_head", "gate_first",
    "time_function",
]  # fmt: skip
_POINTERS = [
    "row_splits", "num_targets", "contextual_lengths", "query_splits", "thresholds", "query", "key", "value", "scale",
    "position_weights", "time_weights", "asks", "answers", "gate", "norm_weight", "norm_bias", "out", "gated", "grads",
    "query_grads", "key_grads", "value_grads", "position_grads", "time_grads", "gate_grads", "norm_weight_grads",
    "norm_bias_grads",
]  # fmt: skip
ORACLES = {"jagged_attention": (attention, attention_grad), "bias_attention": (bias_attention, bias_attention_grad)}


class Call(ctypes.Structure):
    """FusedrecAttention of jagged_attention_cuda.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS), ("alpha", ctypes.c_double), ("epsilon", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS), ("dropped", ctypes.c_int64), ("pair_seed", ctypes.c_int64),
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


class Prepared(NamedTuple):
    """Holds a launcher's call and its arrays."""

    launcher: str
    call: Call
    scratch: Any
    host: dict[str, np.ndarray]
    device: dict[str, Any]
    results: list[str]  # names of those in `device`


def prepare(kernels, op, type_, case, grads=None):
    """Prepares a call of an op of ORACLES: for out, or with grads for the gradients of tensors and weights."""
    memory = kernels.memory
    tokens, heads, value_dim = case["value"].shape
    tensors, masks = [name for name in ("query", "key", "value") if name in case], case.get("masks", {})
    host = {"row_splits": np.asarray(case["row_splits"], np.int64)}
    if case.get("num_targets") is not None:
        host["num_targets"] = np.asarray(case["num_targets"], np.int64)
    queries = tokens
    if case.get("query_splits") is not None:
        host["query_splits"] = np.asarray(case["query_splits"], np.int64)
        queries = int(case["query_splits"][-1])
    context = masks.get("contextual_length", 0)
    if np.any(context):
        host["contextual_lengths"] = np.array(np.broadcast_to(context, [len(case["row_splits"]) - 1]), np.int64)
    device = {name: memory.put(to_bits(type_, case[name])) for name in tensors}
    device["scale"] = memory.put(np.asarray(case.get("scale", 1.0), np.float32).reshape(-1))
    call = Call(
        type=type_, batch=len(case["row_splits"]) - 1, tokens=tokens, heads=heads, qk_dim=case[tensors[0]].shape[2],
        value_dim=value_dim, scale_stride=int(np.ndim(case.get("scale", 1.0)) == 1), num_thresholds=-1,
        alpha=case.get("alpha", 1.0), target_group_size=masks.get("target_group_size", 1),
        attention_window=masks.get("attention_window", 0), min_full_length=masks.get("min_full_length", 0),
        global_window=masks.get("global_window", 0),
        time_function=case.get("time_function", 0), dropped=case.get("dropped", 0), pair_seed=case.get("pair_seed", 0),
    )  # fmt: skip
    wanted, number = {}, to_bits(type_, np.zeros(0)).dtype
    if case.get("position_weights") is not None:
        device["position_weights"] = memory.put(np.asarray(case["position_weights"], np.float32))
        call.max_length = (len(case["position_weights"]) + 1) // 2
        wanted["position_grads"] = ([len(case["position_weights"])], np.float32)
    if case.get("time_weights") is not None:
        device.update({name: memory.put(np.asarray(case[name], np.int64)) for name in ("asks", "answers")})
        device["time_weights"] = memory.put(np.asarray(case["time_weights"], np.float32))
        wanted["time_grads"] = ([len(case["time_weights"])], np.float32)
        if call.time_function == 0:
            host["thresholds"] = np.asarray(case["thresholds"], np.int64)
            call.num_thresholds = len(case["thresholds"])
    channels = len(wanted) if op == "bias_attention" else 1
    if grads is None:
        wanted = {"out": ([queries, heads, channels * value_dim], number)}
    else:
        device["grads"] = memory.put(to_bits(type_, grads))
        wanted = {f"{name}_grads": (case[name].shape, number) for name in tensors} | wanted
    if case.get("gate") is not None:
        device["gate"] = memory.put(to_bits(type_, case["gate"]))
        call.per_head, call.gate_first, call.epsilon = case["per_head"], case["gate_first"], case["epsilon"]
        norms = [name for name in ("norm_weight", "norm_bias") if name in case]
        device.update({name: memory.put(np.asarray(case[name], np.float32)) for name in norms})
        if grads is None:
            wanted["gated"] = wanted["out"]
        else:
            device["out"] = memory.put(to_bits(type_, case["attended"]))
            wanted["gate_grads"] = (case["gate"].shape, number)
            wanted.update({f"{name}_grads": (case[name].shape, np.float32) for name in norms})
    device.update({name: memory.empty(*form) for name, form in wanted.items()})
    for name, array in host.items():
        setattr(call, name, array.ctypes.data)
    for name, array in device.items():
        setattr(call, name, memory.pointer(array).value)
    scratch = memory.empty([kernels.count(f"{op}_scratch_bytes", call)], np.uint8)
    return Prepared(op + ("" if grads is None else "_grad"), call, scratch, host, device, list(wanted))


def run(kernels, op, type_, case, grads=None):
    """Returns out of an op of ORACLES, or with grads the gradients of tensors, position_weights, time_weights."""
    prepared = prepare(kernels, op, type_, case, grads)
    kernels.run(prepared.launcher, prepared.call, prepared.scratch)
    results = {name: kernels.memory.get(prepared.device[name]) for name in prepared.results}
    return {name: x if x.dtype == np.float32 else from_bits(type_, x) for name, x in results.items()}


def assert_near(type_, ours, wanted, what, times=1):
    assert np.all(np.isfinite(ours)), what
    error = np.max(np.abs(ours - wanted), initial=0.0) / max(np.max(np.abs(wanted), initial=0.0), 1e-9)
    assert error <= times * TOLERANCE[type_], f"{what}: error {error:.2e} of the largest number"


def compare(kernels, type_, case, op="jagged_attention"):
    """Compares both passes of an op with their oracles."""
    forward, backward = ORACLES[op]
    tensors = [name for name in ("query", "key", "value") if name in case]
    exact = {**case, **{name: from_bits(type_, to_bits(type_, case[name])) for name in tensors}}
    out = forward(**exact)
    assert_near(type_, run(kernels, op, type_, case)["out"], out, "out")
    grads = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=out.shape)))
    wanted = backward(grads=grads, **exact)
    for name, ours in run(kernels, op, type_, case, grads).items():
        of_function = name == "time_grads" and "time_function" in case
        assert_near(type_, ours, wanted[name], name, 8 if of_function else 1)


def compare_fewer_queries(kernels, type_, case, queries, op="jagged_attention"):
    """Compares rows whose last `queries` tokens ask with the oracle, whose other tokens have no gradient."""
    forward, backward = ORACLES[op]
    splits, counts = np.asarray(case["row_splits"]), np.asarray(queries)
    asking = np.concatenate([np.arange(end - count, end) for end, count in zip(splits[1:], counts)])
    tensors = [name for name in ("query", "key", "value") if name in case]
    exact = {**case, **{name: from_bits(type_, to_bits(type_, case[name])) for name in tensors}}
    fewer = {**case, "query_splits": np.concatenate([[0], np.cumsum(counts)])}
    for name in ("query", "scale", "asks"):
        if np.ndim(case.get(name, 0)) > 0:
            fewer[name] = case[name][asking]
    out = forward(**exact)
    assert_near(type_, run(kernels, op, type_, fewer)["out"], out[asking], "out")
    grads = np.zeros(out.shape)
    grads[asking] = from_bits(type_, to_bits(type_, np.random.default_rng(9).normal(size=out[asking].shape)))
    wanted = backward(grads=grads, **exact)
    for name, ours in run(kernels, op, type_, fewer, grads[asking]).items():
        expected = wanted[name][asking] if name == "query_grads" else wanted[name]
        assert_near(type_, ours, expected, name, 8 if name == "time_grads" and "time_function" in case else 1)


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


def log_thresholds(count):
    """Returns the least differences for which trunc(log(difference) / 0.301) is 1, 2, ..., count."""
    found = []
    for g in range(1, count + 1):
        near = int(np.exp(0.301 * g)) + np.arange(-2, 3)
        near = near[near > 0]
        reached = near[np.trunc(np.log(near.astype(np.float64)) / 0.301) >= g]
        found.append(reached[0] if len(reached) else near[-1])  # so large that no time of a file comes near it
    return np.array(found, np.int64)
