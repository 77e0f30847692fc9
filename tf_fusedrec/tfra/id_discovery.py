"""Finds the ids that a model's layers will look up in a step, so that all ids travel in one exchange.

The model is traced twice. The first trace goes into a scratch graph: each layer records its ids and returns a
stand-in for its rows. The operations that compute the ids are then copied into the step's graph. Nothing else of the
first trace runs: no update, no random number, no loss. Grappler merges the operations that both traces share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops.ancestors import ancestors, copied, scratch_graph, stateful
from tf_fusedrec.tfra.fused_layer import STAND_IN, FusedTfraEmbedding


def discover_ids(
    layers: Sequence[FusedTfraEmbedding], call: Callable[[], Any]
) -> list[tuple[FusedTfraEmbedding, tf.Tensor | None]]:
    """Returns (layer, ids <key dtype>[n]) for every layer call that `call()` makes, grouped by layer.

    The ids belong to the graph being traced. They are None where they depend on another layer's rows or on random
    numbers, because the first trace does not compute these.

    Raises:
      ValueError: A layer is called in a graph nested inside the model's.
    """
    scratch = scratch_graph("which_ids")
    for layer in layers:
        layer.member.recorded = []
    try:
        with scratch.as_default():
            call()
        calls = [(layer, ids) for layer in layers for ids in layer.member.recorded or []]
    finally:
        for layer in layers:
            layer.member.recorded = None
    for layer, ids in calls:
        if ids.graph is not scratch:
            raise ValueError(
                f"Layer {layer.name!r} is called inside a tf.function, a tf.cond or a loop inside the model's call. "
                "A fused layer must be called in the model's own graph. Call it outside of these, or leave it alone: "
                f"fuse(model, leave=[{layer.name!r}])."
            )
    known = [_is_known(scratch, ids) for _, ids in calls]
    copies = iter(copied(scratch, [ids for (_, ids), is_known in zip(calls, known) if is_known], "fused_ids"))
    return [(layer, next(copies) if is_known else None) for (layer, _), is_known in zip(calls, known)]


def _is_known(scratch: Any, ids: tf.Tensor) -> bool:
    operations = ancestors(scratch, [ids])
    stands_in = any(op.name.rsplit("/", 1)[-1].startswith(STAND_IN) for op in operations)
    return not stands_in and not any(stateful(scratch, operations))
