"""SiLU attention that ends with the gate and the norm of an HSTU block."""

from __future__ import annotations

from typing import NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library
from tf_fusedrec.ops.jagged_attention import ATTRIBUTES, RelativeBias, attention_inputs, optional_inputs


class OutputGate(NamedTuple):
    """Gate and norm behind the attention: gate * norm(attention), or norm(gate * attention) with gate_first.

    norm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias, over the columns of all heads, or of each head.
    """

    gate: tf.Tensor  # <type of the value>[Tq, H, Dv]
    weight: tf.Tensor | None = None  # <float>[H * Dv]; None: 1
    bias: tf.Tensor | None = None  # <float>[H * Dv]; None exactly when weight is
    per_head: bool = False
    gate_first: bool = False
    epsilon: float = 1e-6


def gated_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    gate: OutputGate,
    scale: float | tf.Tensor,
    alpha: float = 1.0,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    global_window: int = 0,
    target_group_size: int = 1,
    bias: RelativeBias | None = None,
    query_splits: tf.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: tf.Tensor | None = None,
) -> tf.Tensor:
    """jagged_attention, then gate and norm, in one op. No other op passes over [Tq, H, Dv].

    The norm follows the attention of a token as soon as all heads have it. The backward pass reads the attention, which
    the op keeps. Differentiable in gate, weight, bias and where jagged_attention is; once.

    Args:
      gate: gate and norm.
      query, key, value, row_splits, scale and the other arguments: as in jagged_attention.

    Returns:
      <type of value>[Tq, H, Dv].

    Raises:
      ValueError: as jagged_attention, or gate has only one of weight and bias.
      InvalidArgumentError: as jagged_attention, or the shape of the gate or the size of its weights does not fit.

    Source: Zhai et al., Actions Speak Louder than Words (HSTU), section 3; MTGRBoost, eq. 3, has the gate first.
    """
    if (gate.weight is None) != (gate.bias is None):
        raise ValueError("weight and bias of an OutputGate must be given together, got only one of them.")
    weights = [tf.constant([], tf.float32) if w is None else tf.cast(w, tf.float32) for w in (gate.weight, gate.bias)]
    inputs = attention_inputs(
        query, key, value, row_splits, scale, alpha, bias, query_splits, num_targets=num_targets,
        contextual_length=contextual_length, attention_window=attention_window, min_full_length=min_full_length,
        global_window=global_window, target_group_size=target_group_size, dropout=dropout, dropout_seed=dropout_seed,
    )  # fmt: skip
    return library.fusedrec_gated_attention(
        gate=gate.gate,
        norm_weight=weights[0],
        norm_bias=weights[1],
        per_head=gate.per_head,
        gate_first=gate.gate_first,
        epsilon=gate.epsilon,
        **inputs,
    ).out


@tf.RegisterGradient("Fusedrec>GatedAttention")
def _gated_attention_gradient(op, grads, _):
    attributes = {
        name: op.get_attr(name) for name in (*ATTRIBUTES, "alpha", "dropout", "per_head", "gate_first", "epsilon")
    }
    attributes["time"] = attributes["time"].decode()
    inputs, lists = op.inputs[:15], optional_inputs(op, 15)
    found = library.fusedrec_gated_attention_grad(grads, op.outputs[1], *inputs, *lists, **attributes)
    # Inputs: gate, norm_weight, norm_bias, then the inputs of JaggedAttention.
    return [*found[:6], None, None, None, *found[6:], *(None for _ in op.inputs[11:])]


tf.no_gradient("Fusedrec>GatedAttentionGrad")
