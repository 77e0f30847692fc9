"""Rows of one group inside a call: the forward pass looks them up, and their gradient trains the group's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding.anchor import gradient
from tf_fusedrec.embedding.group_lookup import Context, LookupRequest, RoutedIds
from tf_fusedrec.embedding.lookup import RowGradients, apply_gradients, bring, fetch
from tf_fusedrec.embedding.outputs import restore_form
from tf_fusedrec.exchange import collectives


class Deferral(NamedTuple):
    """A list that collects gradients instead of an update, and an op that must run before rows are handed on."""

    waiting: list[RowGradients]
    gate: Any  # an op or a tensor; None: rows wait for nothing


# For each lookup of a group in one call: its rows [G, D] and their context.
RowsOfGroup = Sequence[tuple[tf.Tensor, Context]]


class GroupCall(NamedTuple):
    """The part of one group in one call of the layer."""

    layer_name: str
    requests: Sequence[LookupRequest]  # of one group, at least one
    routed: Sequence[RoutedIds]  # of each request; empty where rows are supplied
    supplied: RowsOfGroup | None  # rows that a schedule has looked up
    deferral: Deferral | None
    loss_scaler: Any  # the optimizer that scales the loss, or None


def trained_rows(call: GroupCall, anchor: tf.Tensor) -> dict[str, Any]:
    """Rows by feature, in the feature's form. Their gradient trains the group's tables; anchor.py has the anchor's."""
    training, deferral = call.requests[0].training, call.deferral
    counts: list[tf.Tensor] = []

    @tf.custom_gradient
    def forward(anchor: tf.Tensor):
        counts.clear()
        rows, contexts = [], []
        for found, context in _look_up(call):
            counts.append(context.routed.fused.feature_bags)
            if deferral is not None and deferral.gate is not None:
                with tf.control_dependencies([deferral.gate]):
                    found = tf.identity(found)
            rows.append(found)
            contexts.append(context)

        @tf.autograph.experimental.do_not_convert
        def train(*grads: tf.Tensor) -> tf.Tensor:
            _check_scaling(call)
            parts = [RowGradients(*part) for part in zip(contexts, grads)]
            if deferral is not None:
                deferral.waiting.extend(parts)
            elif call.loss_scaler is not None:
                return _train_unscaled(call, parts) + gradient(anchor)
            else:
                apply_gradients(parts)
            return gradient(anchor)

        return rows, train

    outputs: dict[str, Any] = {}
    for request, rows, numbers in zip(call.requests, forward(anchor if training else tf.stop_gradient(anchor)), counts):
        parts = tf.split(rows, numbers) if len(request.features) > 1 else [rows]
        for feature, part in zip(request.features, parts):
            part.set_shape([None, rows.shape[1]])
            outputs[feature.config.name] = restore_form(feature, part)
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
            f"gradients of {call.layer_name!r} wait under this schedule, and the scale of the loss would be lost. "
            "Remedy: schedule='sync' or DualBuffer, or the policy mixed_bfloat16."
        )


def _train_unscaled(call: GroupCall, parts: Sequence[RowGradients]) -> tf.Tensor:
    """Trains by gradients of a scaled loss if they are finite on all ranks. Returns 0 then, else infinity."""
    unscaled = [grad / tf.cast(call.loss_scaler.loss_scale, grad.dtype) for grad in (_wide(p.grads) for p in parts)]
    bad = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.int64)) for grad in unscaled])
    first = call.requests[0]
    name = f"{call.layer_name}.{first.lookup.group.name}.{first.call}.overflows"
    finite = tf.equal(collectives.all_reduce_sum(bad, name=name), 0)

    def train() -> tf.Tensor:
        apply_gradients([one._replace(grads=tf.cast(wide, one.grads.dtype)) for one, wide in zip(parts, unscaled)])
        return tf.zeros([])

    return tf.cond(finite, train, lambda: tf.constant(np.inf, tf.float32))


def _wide(grad: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(grad), tf.float32)


def _look_up(call: GroupCall) -> list[tuple[tf.Tensor, Context]]:
    """Rows [G, D] of each request and their context: looked up here, or supplied by a schedule."""
    if call.supplied is not None:
        return [_checked(call.layer_name, *part) for part in zip(call.requests, call.supplied)]
    contexts = fetch(call.routed)
    return list(zip(bring(contexts), contexts))


def _checked(layer_name: str, request: LookupRequest, supplied: tuple[tf.Tensor, Context]) -> tuple[tf.Tensor, Context]:
    """Supplied rows and their context, after a check that they belong to the ids of the request."""
    rows, context = supplied
    same = tf.debugging.assert_equal(
        tf.add_n([tf.size(feature.ids) for feature in request.features]),
        tf.size(context.routed.fused.ids),
        f"{layer_name!r} was called with other ids in a training step than were looked up ahead. Remedy: "
        "embedding_inputs of the model must give the calls that a training step makes.",
    )
    with tf.control_dependencies([same] if same is not None else []):
        return tf.identity(rows), context
