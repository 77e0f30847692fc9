"""Rows of one group inside a call get their gradient, which trains the group's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.anchor import gradient
from tf_fusedrec.embedding.lookup import Found, RowGradients
from tf_fusedrec.embedding.outputs import restore_form
from tf_fusedrec.embedding.routed_ids import LookupRequest


def trained_rows(
    requests: Sequence[LookupRequest],
    found: Sequence[Found],
    anchor: tf.Tensor,
    train: Callable[[Sequence[LookupRequest], Sequence[RowGradients]], tf.Tensor],
) -> dict[str, Any]:
    """Rows by feature, in the feature's form. Their gradient trains the group's tables; anchor.py has the anchor's.

    Args:
      requests: The lookups of one group in a call, at least one.
      found: The rows of each request.
      anchor: <float32>[], the layer's anchor.
      train: CallSteps.train.
    """

    @tf.custom_gradient
    def forward(anchor: tf.Tensor):
        @tf.autograph.experimental.do_not_convert
        def backward(*grads: tf.Tensor) -> tf.Tensor:
            gradients = [RowGradients(one.context, grad) for one, grad in zip(found, grads)]
            return train(requests, gradients) + gradient(anchor)

        return [one.rows for one in found], backward

    outputs: dict[str, Any] = {}
    trains = requests[0].training
    for request, one, rows in zip(requests, found, forward(anchor if trains else tf.stop_gradient(anchor))):
        numbers = one.context.routed.fused.feature_bags
        parts = tf.split(rows, numbers) if len(request.features) > 1 else [rows]
        for feature, part in zip(request.features, parts):
            part.set_shape([None, rows.shape[1]])
            outputs[feature.config.name] = restore_form(feature, part)
    return outputs
