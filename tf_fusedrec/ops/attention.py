"""SiLU attention over rows of different length, with a bias by distance in the sequence and in time.

Two ops share masks and bias: `jagged_attention` (HSTU: queries, keys, SiLU) and `bias_attention` (the channels of
FuXi: the bias itself is the map). Both work tile by tile; nothing of size sequence x sequence is ever in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops._library import library

WINDOWS = ("attention_window", "min_full_length", "global_window")
TIME_FUNCTIONS = ("power", "exponential", "stretched")


class SequenceTimes(NamedTuple):
    """Times of each token: when it asks, and when it happened."""

    asks: tf.Tensor  # <int64>[T], seconds; [Tq] with query_splits
    answers: tf.Tensor  # <int64>[T], seconds


class BucketTable(NamedTuple):
    """One weight for each range of |ask - answer|."""

    weights: tf.Tensor  # <float>[J+1]
    thresholds: tf.Tensor  # <int64>[J], not decreasing; a difference's bucket is the number of thresholds <= it


class TimeFunction(NamedTuple):
    """A function of d = max(ask - answer, 0) seconds with trained scalars.

    kind "power", parameters [a, b]: a (d + 1)^-b, the default of FuXi-beta;
    kind "exponential", [a, b]: a exp(-exp(b) d), its other form;
    kind "stretched", [a, c, b]: a exp(-softplus(c) (d + 1)^b), as FuXi-gamma's a g^(d^b). The paper leaves open the
    form of g in (0, 1) and the value at d = 0. This project chose softplus and the second added to d.
    """

    kind: str
    parameters: tf.Tensor  # <float>[2 or 3]


class RelativeBias(NamedTuple):
    """Summand of the score of a pair of tokens, the same for all heads: a position part, a time part, or both."""

    position_weights: tf.Tensor | None = None  # <float>[2N-1], entry N-1 + place(answering) - place(asking)
    time: BucketTable | TimeFunction | None = None
    times: SequenceTimes | None = None  # given exactly when time is


class OutputGate(NamedTuple):
    """Gate and norm after the attention: gate * norm(attention), or norm(gate * attention) with gate_first.

    norm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias, over the columns of all heads, or of each head.
    """

    gate: tf.Tensor  # <type of the value>[Tq, H, Dv]
    weight: tf.Tensor | None = None  # <float>[H * Dv]; None: 1
    bias: tf.Tensor | None = None  # <float>[H * Dv]; None exactly when weight is
    per_head: bool = False
    gate_first: bool = False
    epsilon: float = 1e-6


def jagged_attention(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
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
    gate: OutputGate | None = None,
) -> tf.Tensor:
    """out_i = scale_i * sum_j SiLU(alpha query_i . key_j + bias_ij) visible_ij value_j, in each row and head.

    The mask multiplies after SiLU. Without a softmax, weights do not sum to one. alpha multiplies the product and not
    the bias (Meta's convention; NVIDIA's operators multiply both: give them alpha * weights). `scale` is 1 / N in the
    HSTU papers' code. N is the static maximum length, so the result does not depend on which rows share a batch.

    A row is [context | history | targets], as in the public HSTU operators. Context tokens see all context and all
    history. History is causal and sees the context and itself. A target sees context, history and itself, never another
    target. Example, 2 context, 3 history, 2 target tokens (rows ask, columns answer):

        1 1 1 1 1 0 0
        1 1 1 1 1 0 0
        1 1 1 0 0 0 0
        1 1 1 1 0 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 1 0
        1 1 1 1 1 0 1

    With a window W, history and targets see W tokens back, where the context counts as one token. With
    min_full_length F, the last F history tokens and the targets ignore the window. With a global_window K, all tokens
    also see the context and the first K history tokens (semi-local attention). With a target_group_size g, the targets
    of a row form groups of g, first targets first. The last group may be smaller. A target also sees the targets of its
    group before it.

    All targets of a row stand at one place for the position bias, the one after the history: their order must not
    matter.

    With query_splits, only the last tokens of each row ask: new events and candidates against the keys and values of a
    history. Masks and bias take the places of the whole row. A query has the bits that it has when every token asks.
    Rows of at most 64 tokens are the exception: their sums run in another order.

    Nothing of size L x L is in memory: the backward pass computes the scores again. The same bits for any number of
    threads. Differentiable in query, key, value and the weights of the bias; once.

    Args:
      query: <float32, bfloat16 or float16>[Tq, H, Dqk]; 16-bit types are computed in float32 and rounded once. Tq is T
        without query_splits.
      key: <same type>[T, H, Dqk].
      value: <same type>[T, H, Dv].
      row_splits: <int64>[B+1] bounds of the rows in the tokens. Rows may be empty, B and T may be 0.
      scale: number, <float>[] or <float>[Tq], one per query token. No gradient flows to it.
      alpha: factor of the product of query and key; 1 / sqrt(Dqk) in the production layer of HSTU.
      num_targets: None or <int>[B], targets at the end of each row.
      contextual_length: C, context tokens at the start of each row: a number, or <int>[B], one per row.
      attention_window: W, 0 for none.
      min_full_length: F; only with a window.
      global_window: K; only with a window.
      target_group_size: g >= 1; 2 for targets of an item and an action, for example.
      bias: position and time bias, shared by the heads. With query_splits, its asks are <int64>[Tq].
      query_splits: None, or <int>[B+1]: row b has query_splits[b+1] - query_splits[b] queries, at least its targets.
      dropout: share of the pairs that are hidden at random, 0 <= dropout < 1. The sum of the others is divided by
        1 - dropout.
      dropout_seed: <int64>[]; given exactly with dropout. A pair depends on seed, row, head, key and query only.
      gate: gate and norm behind the attention; no other op passes over [Tq, H, Dv]. The norm follows the attention of a
        token as soon as all heads have it. The op keeps the attention for its backward pass. Differentiable in gate,
        weight and bias.

    Returns:
      <type of value>[Tq, H, Dv].

    Raises:
      ValueError: dropout is out of range or lacks its seed, a length is negative, target_group_size is below 1,
        global_window lacks attention_window, bias is incomplete, or gate has only one of weight and bias.
      InvalidArgumentError: shapes do not fit together; row_splits do not run from 0 to T without decreasing;
        num_targets is not between 0 and the row's length; contextual_length of a row is negative; a row is longer than
        N of position_weights; thresholds decrease; times are not one per token; a row has more queries than tokens, or
        more targets than queries.

    Source: Zhai et al., Actions Speak Louder than Words (HSTU), section 3; masks as in its public operators. MTGRBoost,
    eq. 3, has the gate first.

    Examples:
      >>> tokens, row_splits = tf.ones([5, 2, 8]), tf.constant([0, 3, 5], tf.int64)  # two rows, two heads
      >>> bias, gate = fr.layers.RelativeBias(position_weights=tf.zeros([31])), fr.layers.OutputGate(tokens)
      >>> fr.layers.jagged_attention(tokens, tokens, tokens, row_splits, scale=1 / 16, bias=bias, gate=gate).shape
      TensorShape([5, 2, 8])
    """
    return library.fusedrec_jagged_attention(
        **_attention_inputs(
            query, key, value, row_splits, scale, alpha, bias, query_splits, dropout, dropout_seed, num_targets,
            contextual_length, attention_window, min_full_length, global_window, target_group_size,
        ),
        **_gate_inputs(gate),
    ).out  # fmt: skip


def bias_attention(
    value: tf.Tensor,
    row_splits: tf.Tensor,
    *,
    bias: RelativeBias,
    num_targets: tf.Tensor | None = None,
    contextual_length: int | tf.Tensor = 0,
    attention_window: int = 0,
    min_full_length: int = 0,
    global_window: int = 0,
    target_group_size: int = 1,
    query_splits: tf.Tensor | None = None,
) -> tf.Tensor:
    """out_i = [sum_j position_ij visible_ij value_j | sum_j time_ij visible_ij value_j], in each row and head.

    The channels of FuXi: the parts of the bias are the maps, the same for all heads, without SiLU and without divisor.
    Masks, memory and determinism as in jagged_attention. Differentiable in value and the weights of the bias; once.

    Args:
      value: <float32, bfloat16 or float16>[T, H, Dv].
      bias: one or both parts.
      row_splits, num_targets, contextual_length, attention_window, min_full_length, global_window, target_group_size,
        query_splits: as in jagged_attention.

    Returns:
      <type of value>[Tq, H, 2 * Dv], in each head the position channel, then the time channel; [Tq, H, Dv] when the
      bias has one part.

    Raises:
      ValueError: as in jagged_attention, or bias has no part.
      InvalidArgumentError: as in jagged_attention.

    Source: Ye et al., FuXi-alpha, section 3 (adaptive multi-channel self-attention); FuXi-beta.

    Examples:
      >>> tokens, row_splits = tf.ones([5, 2, 8]), tf.constant([0, 3, 5], tf.int64)  # two rows, two heads
      >>> times = fr.layers.sequence_times(tf.ragged.constant([[0, 60, 3600], [0, 5]], dtype=tf.int64))
      >>> table = fr.layers.BucketTable(tf.ones([3]), tf.constant([60, 3600], tf.int64))
      >>> by_bucket = fr.layers.RelativeBias(time=table, times=times)
      >>> by_power = fr.layers.RelativeBias(time=fr.layers.TimeFunction("power", tf.constant([1.0, 0.5])), times=times)
      >>> [fr.layers.bias_attention(tokens, row_splits, bias=bias).shape for bias in (by_bucket, by_power)]
      [TensorShape([5, 2, 8]), TensorShape([5, 2, 8])]
    """
    if bias.position_weights is None and bias.time is None:
        raise ValueError("bias must have position_weights, time, or both, got neither.")
    return library.fusedrec_jagged_bias_attention(
        value=value,
        **_row_inputs(
            row_splits, bias, query_splits, num_targets, contextual_length, attention_window, min_full_length,
            global_window, target_group_size,
        ),
    )  # fmt: skip


def sequence_times(
    timestamps: tf.RaggedTensor, query_times: tf.RaggedTensor | None = None, num_targets: tf.Tensor | None = None
) -> SequenceTimes:
    """Computes when the tokens of a batch ask and when they happened. Call it once per batch, for all blocks.

    Args:
      timestamps: RaggedTensor <int64>[B,(L)], seconds; when each token happened.
      query_times: RaggedTensor <int64>[B,(L)], seconds; when each token asks. The default is the research rule. Token i
        asks at the time of token i+1 (when the answer was wanted), the last token at its own time. When the time of the
        request is known (training to predict a next item, serving), give it here.
      num_targets: None or <int>[B]. Affects the default of query_times only. The last history token and the targets ask
        at their own time, so a target's time reaches no other token.

    Returns:
      SequenceTimes, for `RelativeBias`.

    Raises:
      ValueError: timestamps or query_times is not a RaggedTensor of int64.
    """
    _check_times("timestamps", timestamps)
    if query_times is None:
        return SequenceTimes(_next_times(timestamps, num_targets), timestamps.values)
    _check_times("query_times", query_times)
    return SequenceTimes(query_times.values, timestamps.values)


def _next_times(timestamps: tf.RaggedTensor, num_targets: tf.Tensor | None) -> tf.Tensor:
    """Returns the time of the next token. The last history token and the targets keep their own."""
    row_ends = timestamps.row_splits[1:]
    tokens = tf.range(tf.size(timestamps.values, tf.int64))
    rows = tf.raw_ops.UpperBound(sorted_inputs=row_ends[tf.newaxis], values=tokens[tf.newaxis])[0]
    history_end = row_ends if num_targets is None else row_ends - tf.cast(num_targets, tf.int64)
    successor = tokens + tf.cast(tokens + 1 < tf.gather(history_end, rows), tf.int64)
    return tf.gather(timestamps.values, successor)


def _check_times(name: str, times: tf.RaggedTensor) -> None:
    if not isinstance(times, tf.RaggedTensor) or times.ragged_rank != 1:
        raise ValueError(f"{name} must be a RaggedTensor [B,(L)], got {type(times).__name__}.")
    if times.dtype != tf.int64:
        raise ValueError(f"{name} must be int64 seconds, got {times.dtype.name}. Cast with tf.cast(x, tf.int64).")


def contextual_lengths(contextual_length: int | tf.Tensor, row_splits: tf.Tensor) -> tf.Tensor | None:
    """Returns the number of context tokens of each row, <int64>[B], from one number or <int>[B]; None for 0."""
    if isinstance(contextual_length, (int, np.integer)):
        if contextual_length < 0:
            raise ValueError(f"contextual_length must be >= 0, got {contextual_length}. Use 0 for none.")
        if contextual_length == 0:
            return None
        return tf.fill([tf.size(row_splits) - 1], tf.constant(contextual_length, tf.int64))
    return tf.cast(contextual_length, tf.int64)


def checked_windows(attention_window: int, min_full_length: int, global_window: int) -> dict[str, int]:
    """Returns the arguments by name. Raises ValueError as jagged_attention."""
    lengths = dict(zip(WINDOWS, (attention_window, min_full_length, global_window)))
    for name, length in lengths.items():
        if length < 0:
            raise ValueError(f"{name} must be >= 0, got {length}. Use 0 for none.")
    if global_window and not attention_window:
        raise ValueError(
            f"global_window = {global_window} needs an attention_window, got 0. Without a window, tokens see all keys."
        )
    return lengths


def _attention_inputs(
    query, key, value, row_splits, scale, alpha, bias: RelativeBias | None, query_splits, dropout, dropout_seed, *masks
) -> dict[str, Any]:  # fmt: skip
    """Returns inputs and attributes of JaggedAttention."""
    if not 0 <= dropout < 1 or (dropout > 0) != (dropout_seed is not None):
        raise ValueError(
            "dropout must be >= 0 and < 1, with dropout_seed exactly where it is > 0, "
            f"got {dropout} and {dropout_seed}."
        )
    return {
        **_row_inputs(row_splits, bias or RelativeBias(), query_splits, *masks),
        "query": query, "key": key, "value": value, "alpha": alpha,
        "scale": tf.cast(scale, tf.float32) / (1.0 - dropout), "dropout": dropout,
        "dropout_seed": [] if dropout_seed is None else [tf.cast(dropout_seed, tf.int64)],
    }  # fmt: skip


def _gate_inputs(gate: OutputGate | None) -> dict[str, Any]:
    if gate is None:
        return {"gate": [], "norm": []}
    norm = [weights for weights in (gate.weight, gate.bias) if weights is not None]
    if len(norm) == 1:
        raise ValueError("weight and bias of an OutputGate must be given together, got only one of them.")
    return {
        "gate": [gate.gate], "norm": [tf.cast(weights, tf.float32) for weights in norm],
        "per_head": gate.per_head, "gate_first": gate.gate_first, "epsilon": gate.epsilon,
    }  # fmt: skip


def _row_inputs(
    row_splits, bias: RelativeBias, query_splits, num_targets, contextual_length, attention_window, min_full_length,
    global_window, target_group_size,
) -> dict[str, Any]:  # fmt: skip
    """Returns the inputs and attributes for rows, masks and bias of all ops. Missing inputs are empty."""
    windows = checked_windows(attention_window, min_full_length, global_window)
    if target_group_size < 1:
        raise ValueError(f"target_group_size must be >= 1, got {target_group_size}. Use 1 for targets on their own.")
    position_weights, time, times = bias
    if (time is None) != (times is None):
        raise ValueError("time and times of a RelativeBias must be given together, got only one of them.")
    no_weights, no_integers = tf.constant([], tf.float32), tf.constant([], tf.int64)
    form, time_weights, thresholds = "none", no_weights, no_integers
    if isinstance(time, TimeFunction):
        if time.kind not in TIME_FUNCTIONS:
            raise ValueError(f"kind of a TimeFunction must be one of {TIME_FUNCTIONS}, got {time.kind!r}.")
        form, time_weights = time.kind, time.parameters
    elif time is not None:
        form, time_weights, thresholds = "buckets", time.weights, time.thresholds
    contexts = contextual_lengths(contextual_length, row_splits)
    return {
        **windows,
        "target_group_size": target_group_size,
        "contextual_lengths": no_integers if contexts is None else contexts,
        "row_splits": tf.cast(row_splits, tf.int64),
        "targets": num_targets is not None,
        "num_targets": no_integers if num_targets is None else tf.cast(num_targets, tf.int64),
        "position": position_weights is not None,
        "position_weights": no_weights if position_weights is None else tf.cast(position_weights, tf.float32),
        "time": form,
        "time_weights": tf.cast(time_weights, tf.float32),
        "thresholds": thresholds,
        "asks": no_integers if times is None else times.asks,
        "answers": no_integers if times is None else times.answers,
        "query_splits": [] if query_splits is None else [tf.cast(query_splits, tf.int64)],
    }


# Inputs of the ops, in their order. Lists have the attributes of their lengths.
_ROWS = (
    "row_splits", "num_targets", "contextual_lengths", "position_weights", "time_weights", "thresholds", "asks",
    "answers", "query_splits",
)  # fmt: skip
_ATTENTION = ("query", "key", "value", "scale", *_ROWS, "dropout_seed", "gate", "norm")
_LISTS = {
    "query_splits": "num_query_splits", "dropout_seed": "num_dropout_seeds", "gate": "num_gates", "norm": "num_norms",
}  # fmt: skip
_OUTPUTS = {"position_weights": "position_grads", "time_weights": "time_grads"}  # others: the input and _grads


def _register_gradient(name: str, gradient_op: str, inputs: tuple[str, ...], *more: str) -> None:
    """Registers the gradient op of `name`. `more`: attributes in addition to those of masks and bias."""

    @tf.RegisterGradient(f"Fusedrec>{name}")
    def gradient(op, grads, *_):
        names = (*WINDOWS, "target_group_size", "targets", "position", "time", *more)
        attributes = {attribute: op.get_attr(attribute) for attribute in names}
        attributes["time"] = attributes["time"].decode()
        remaining, tensors = list(op.inputs), {}
        for key in inputs:
            count = op.get_attr(_LISTS[key]) if key in _LISTS else 1
            tensors[key], remaining = remaining[:count] if key in _LISTS else remaining[0], remaining[count:]
        kept = {"attended": op.outputs[1:]} if "gate" in inputs else {}
        results = getattr(library, gradient_op)(grads=grads, **kept, **tensors, **attributes)
        gradients = []
        for key, tensor in tensors.items():
            gradient = getattr(results, _OUTPUTS.get(key, f"{key}_grads"), None)
            gradients += [gradient] if not isinstance(tensor, list) else gradient or [None] * len(tensor)
        return gradients

    tf.no_gradient(f"Fusedrec>{name}Grad")


_register_gradient("JaggedBiasAttention", "fusedrec_jagged_bias_attention_grad", ("value", *_ROWS))
_register_gradient(
    "JaggedAttention", "fusedrec_jagged_attention_grad", _ATTENTION, "alpha", "dropout", "per_head", "gate_first",
    "epsilon",
)  # fmt: skip
