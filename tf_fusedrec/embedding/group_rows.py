"""Rows of one group inside a call: brought forward by its lookups, trained backward by what the tape hands back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding import features
from tf_fusedrec.embedding.anchor import gradient
from tf_fusedrec.embedding.batch_lookup import LaneCall, WaitingGradients, apply_waiting, fetch
from tf_fusedrec.embedding.group_lookup import Context, Routed
from tf_fusedrec.exchange import collectives


class Deferral(NamedTuple):
    """Where gradients wait instead of training, and what must have run before rows are handed on."""

    waiting: list[WaitingGradients]
    gate: Any  # an op or a tensor; None for nothing


# Of one group in a call: rows [G, D] of each lane and their context.
AnswerOfGroup = Sequence[tuple[tf.Tensor, Context]]


class GroupCall(NamedTuple):
    """One call of the layer, as far as one group has part in it."""

    layer_name: str
    lanes: Sequence[LaneCall]  # of one group, one at least
    routed: Sequence[Routed]  # of each; none where there is an answer
    answer: AnswerOfGroup | None  # what is there already
    deferral: Deferral | None
    loss_scaler: Any  # the optimizer that scales the loss, or None


def rows_of_group(call: GroupCall, anchor: tf.Tensor) -> dict[str, Any]:
    """Rows by feature, in the feature's form. Their gradient trains the group's tables; the anchor's: see anchor.py."""
    lookup, training, deferral = call.lanes[0].lookup, call.lanes[0].training, call.deferral
    counts: list[tf.Tensor] = []

    @tf.custom_gradient
    def forward(anchor: tf.Tensor):
        counts.clear()
        rows, contexts = [], []
        for of_lane, context in _rows_of_lanes(call):
            counts.append(context.routed.fused.feature_bags)
            if deferral is not None and deferral.gate is not None:
                with tf.control_dependencies([deferral.gate]):
                    of_lane = tf.identity(of_lane)
            rows.append(of_lane)
            contexts.append(context)

        @tf.autograph.experimental.do_not_convert
        def train(*grads: tf.Tensor) -> tf.Tensor:
            _check_scaling(call)
            waiting = [WaitingGradients(lookup, *part) for part in zip(contexts, grads)]
            if deferral is not None:
                deferral.waiting.extend(waiting)
            elif call.loss_scaler is not None:
                return _train_unscaled(call, waiting) + gradient(anchor)
            else:
                apply_waiting(waiting)
            return gradient(anchor)

        return rows, train

    brought = forward(anchor if training else tf.stop_gradient(anchor))
    outputs: dict[str, Any] = {}
    for lane, rows, numbers in zip([lane.features for lane in call.lanes], brought, counts):
        parts = tf.split(rows, numbers) if len(lane) > 1 else [rows]
        for feature, part in zip(lane, parts):
            part.set_shape([None, rows.shape[1]])
            outputs[feature.config.name] = features.restore_form(feature, part)
    return outputs


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


def _train_unscaled(call: GroupCall, waiting: Sequence[WaitingGradients]) -> tf.Tensor:
    """Trains by gradients of a scaled loss, where they are finite on all ranks; the anchor's gradient says so."""
    unscaled = [grad / tf.cast(call.loss_scaler.loss_scale, grad.dtype) for grad in (_wide(w.grads) for w in waiting)]
    bad = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.int64)) for grad in unscaled])
    first = call.lanes[0]
    name = f"{call.layer_name}.{first.lookup.group.name}.{first.number}.overflows"
    finite = tf.equal(collectives.all_reduce_sum(bad, name=name), 0)

    def train() -> tf.Tensor:
        apply_waiting([one._replace(grads=tf.cast(wide, one.grads.dtype)) for one, wide in zip(waiting, unscaled)])
        return tf.zeros([])

    return tf.cond(finite, train, lambda: tf.constant(np.inf, tf.float32))


def _wide(grad: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(grad), tf.float32)


def _rows_of_lanes(call: GroupCall) -> list[tuple[tf.Tensor, Context]]:
    """Rows [G, D] of each lane and their context: looked up, or the answers that are there."""
    if call.answer is not None:
        return [_checked(call, number) for number in range(len(call.lanes))]
    contexts = fetch(call.lanes, call.routed)
    return [(lane.lookup.bring(context), context) for lane, context in zip(call.lanes, contexts)]


def _checked(call: GroupCall, number: int) -> tuple[tf.Tensor, Context]:
    """The answer to a lane, after a check that it is one to these ids."""
    lane = call.lanes[number]
    assert call.answer is not None
    rows, context = call.answer[number]
    same = tf.debugging.assert_equal(
        tf.add_n([tf.size(feature.ids) for feature in lane.features]),
        tf.size(context.routed.fused.ids),
        f"{call.layer_name!r} was called with other ids in a training step than were looked up ahead. Remedy: "
        "embedding_inputs of the model must give the calls that a training step makes.",
    )
    with tf.control_dependencies([same] if same is not None else []):
        return tf.identity(rows), context
