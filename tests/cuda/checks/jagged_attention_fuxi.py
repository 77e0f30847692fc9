"""Blocks of FuXi, forward and backward, against files of independent reference results.

Attention and channels by the kernels, the dense rest in NumPy. The files hold what the published code gave in float32.
"""

from __future__ import annotations

import json

import numpy as np

from tests.cuda.checks import once
from tests.cuda.checks.jagged_attention_call import log_thresholds, run
from tests.oracles.fuxi import rms_norm, silu
from tests.support.shared import ROOT


def silu_grad(x, grads):
    gate = 1.0 / (1.0 + np.exp(-x))
    return grads * gate * (1.0 + x * (1.0 - gate))


def rms_norm_grad(x, grads):
    norm = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return grads / norm - x * np.mean(x * grads, axis=-1, keepdims=True) / norm**3


def case_of(arrays, settings):
    """Returns the arguments of the channels without the values."""
    lengths = np.diff(arrays["seq_offsets"])
    stamps = np.concatenate([arrays["timestamps"], arrays["timestamps"][:, -1:]], axis=1)
    case = {
        "row_splits": arrays["seq_offsets"], "position_weights": arrays["_rel_attn_bias___pos_w"],
        "answers": np.concatenate([row[:n] for row, n in zip(stamps, lengths)]),
        "asks": np.concatenate([row[1 : n + 1] for row, n in zip(stamps, lengths)]), "scale": 1.0 / settings["n"],
    }  # fmt: skip
    if "_rel_attn_bias___ts_w" in arrays:
        buckets = arrays["_rel_attn_bias___ts_w"]
        return {**case, "time": "buckets", "time_weights": buckets, "thresholds": log_thresholds(len(buckets) - 1)}
    scalars = [arrays[f"_rel_attn_bias___exp_{name}"][0] for name in "ab"]
    return {**case, "time": "exponential", "time_weights": np.array(scalars)}


@once
def check_blocks_of_fuxi(kernels):
    folder = ROOT.parent / "shared/oracle/hstu"
    if not folder.exists():
        print("jagged_attention: skipped the blocks of FuXi: ../shared/oracle/hstu is not there")
        return
    for name in ("fuxi_alpha_block", "fuxi_beta_exp"):
        arrays = dict(np.load(folder / f"{name}.npz"))
        compare_block(kernels, arrays, json.loads(bytes(arrays.pop("meta_json"))), name)


def compare_block(kernels, arrays, settings, name):
    x, heads, dim = arrays["x"].astype(np.float64), settings["heads"], settings["dv"]
    into, gate, output, linear = (arrays[f"_mffn__lin{i}__weight"] for i in range(4))
    case, alpha = case_of(arrays, settings), "alpha" in name
    count = 3 if alpha else 2
    projected = silu(rms_norm(x) @ arrays["_uvqk"])
    columns = np.array([count, 1, 1, 1][:count]) * heads * dim
    u, value, *query_key = np.split(projected, np.cumsum(columns), axis=1)
    heads_of = lambda array: array.reshape(len(x), heads, -1)  # noqa: E731
    case["value"] = heads_of(value)
    parts = [run(kernels, 0, case)["out"]]
    if alpha:
        plain = {key: case[key] for key in ("row_splits", "scale", "value")}
        plain.update(zip(("query", "key"), map(heads_of, query_key)))
        parts.append(run(kernels, 0, plain)["out"])
    out = np.concatenate(parts, axis=2).reshape(len(x), -1)
    hidden = x + (u * rms_norm(out)) @ into.T + arrays["_mffn__lin0__bias"]
    inner = rms_norm(hidden)
    ours = hidden + (silu(inner @ gate.T) * (inner @ linear.T)) @ output.T
    error = np.max(np.abs(ours - arrays["out"])) / np.max(np.abs(arrays["out"]))
    assert error <= 1e-5, (
        f"{name}: error {error:.2e}"
    )  # the reference is float32, through three norms and five products

    of_inner = arrays["dout"] @ output
    of_gate = silu_grad(inner @ gate.T, of_inner * (inner @ linear.T))
    of_linear = of_inner * silu(inner @ gate.T)
    of_hidden = arrays["dout"] + rms_norm_grad(hidden, of_gate @ gate + of_linear @ linear)
    of_out = rms_norm_grad(out, (of_hidden @ into) * u).reshape(len(x), heads, -1)
    found = run(kernels, 0, case, of_out[:, :, : 2 * dim])
    time = [arrays["d__rel_attn_bias___ts_w"]] if alpha else [arrays[f"d__rel_attn_bias___exp_{n}"] for n in "ab"]
    wanted = {"position_grads": arrays["d__rel_attn_bias___pos_w"], "time_grads": np.concatenate(time)}
    for weights, expected in wanted.items():
        # Gradients of layers: 1e-4 of the size of the largest entry, as the reference results ask.
        error = np.max(np.abs(found[weights] - expected)) / max(1.0, np.max(np.abs(expected)))
        assert error <= 1e-4, f"{name} {weights}: error {error:.2e}"
