"""Rows of one group inside a call: brought forward by its lookups, trained backward by what the tape hands back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec import collectives, features
from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.lookup import Context, GroupLookup, WaitingGradients


class Deferral(NamedTuple):
    """Where gradients wait instead of training, and what must have run before rows are handed on."""

    waiting: list[WaitingGradients]
    gate: Any  # an op or a tensor; None for nothing


class GroupCall(NamedTuple):
    """One call of the layer, as far as one group has part in it."""

    layer_name: str
    lookup: GroupLookup
    features: Sequence[features.FlatFeature]
    number: int  # of the call in its graph
    training: bool
    answer: tuple[tf.Tensor, Context] | None  # rows and context that are there already
    deferral: Deferral | None
    loss_scaler: Any  # the optimizer that scales the loss, or None


def rows_of_group(call: GroupCall, anchor: tf.Tensor) -> dict[str, Any]:
    """Rows by feature, in the feature's form. Their gradient trains the group's tables; that of the anchor is zero."""
    lookup, deferral = call.lookup, call.deferral
    lanes = [lane for _, lane in lookup.lanes(call.features)]
    counts: list[tf.Tensor] = []

    @tf.custom_gradient
    def forward(anchor: tf.Tensor):
        counts.clear()
        rows, contexts = [], []
        for lane in lanes:
            of_lane, context = _rows_of_lane(call, lane)
            counts.append(context.routed.fused.feature_bags)
            if deferral is not None and deferral.gate is not None:
                with tf.control_dependencies([deferral.gate]):
                    of_lane = tf.identity(of_lane)
            rows.append(of_lane)
            contexts.append(context)

        @tf.autograph.experimental.do_not_convert
        def train(*grads: tf.Tensor) -> tf.Tensor:
            _check_scaling(call)
            if deferral is not None:
                deferral.waiting.extend(WaitingGradients(lookup, *part) for part in zip(contexts, grads))
            elif call.loss_scaler is not None:
                return _train_unscaled(call, contexts, grads)
            else:
                _train(lookup, contexts, grads)
            return tf.zeros_like(anchor)

        return rows, train

    brought = forward(anchor if call.training else tf.stop_gradient(anchor))
    outputs: dict[str, Any] = {}
    for lane, rows, numbers in zip(lanes, brought, counts):
        parts = tf.split(rows, numbers) if len(lane) > 1 else [rows]
        for feature, part in zip(lane, parts):
            part.set_shape([None, rows.shape[1]])
            outputs[feature.config.name] = features.restore_form(feature, part)
    return outputs


def _train(lookup: GroupLookup, contexts: Sequence[Context], grads: Sequence[tf.Tensor]) -> None:
    if len(contexts) == 1:
        lookup.apply_gradients(contexts[0], grads[0])
    else:
        lookup.apply_together(list(zip(contexts, grads)))


def _check_scaling(call: GroupCall) -> None:
    if call.loss_scaler is None and keras.mixed_precision.global_policy().name == "mixed_float16":
        raise ValueError(
            f"{call.layer_name!r} cannot train under the policy mixed_float16 here: the loss is scaled, and rows are "
            "trained before the scale is taken off. Remedy: PipelinedModel, a loop inside "
            "`embedding.loss_scaled_by(optimizer)`, or the policy mixed_bfloat16."
        )
    if call.loss_scaler is not None and call.deferral is not None:
        raise ValueError(
            f"gradients of {call.layer_name!r} wait under this schedule, and a scale of the loss would be forgotten. "
            "Remedy: schedule='sync' or DualBuffer, or the policy mixed_bfloat16."
        )


def _train_unscaled(call: GroupCall, contexts: Sequence[Context], grads: Sequence[tf.Tensor]) -> tf.Tensor:
    """Trains by gradients of a scaled loss, where they are finite on all ranks; the anchor's gradient says so."""
    unscaled = [grad / tf.cast(call.loss_scaler.loss_scale, grad.dtype) for grad in map(_wide, grads)]
    bad = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.int64)) for grad in unscaled])
    name = f"{call.layer_name}.{call.lookup.group.name}.{call.number}.overflows"
    finite = tf.equal(collectives.all_reduce_sum(bad, name=name), 0)

    def train() -> tf.Tensor:
        _train(call.lookup, contexts, [tf.cast(wide, grad.dtype) for wide, grad in zip(unscaled, grads)])
        return tf.zeros([])

    return tf.cond(finite, train, lambda: tf.constant(np.inf, tf.float32))


def _wide(grad: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(grad), tf.float32)


def _rows_of_lane(call: GroupCall, lane: list[features.FlatFeature]) -> tuple[tf.Tensor, Context]:
    """Rows [G, D] and their context: looked up, or the answer after a check that it is one to these ids."""
    if call.answer is None:
        rows, _, context = call.lookup.lookup(lane, call=call.number, training=call.training)
        return rows, context
    rows, context = call.answer
    same = tf.debugging.assert_equal(
        tf.add_n([tf.size(feature.ids) for feature in lane]),
        tf.size(context.routed.fused.ids),
        f"{call.layer_name!r} was called with other ids in a training step than were looked up ahead. Remedy: "
        "embedding_inputs of the model must give the calls that a training step makes.",
    )
    with tf.control_dependencies([same] if same is not None else []):
        return tf.identity(rows), context
