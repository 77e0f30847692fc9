"""Finds the ids that a model's layers will look up in a step, so that all ids travel in one exchange.

The model is traced twice. The first trace goes into a scratch graph: each layer records its ids and returns a
stand-in for its rows. The operations that compute the ids are then copied into the step's graph. Nothing else of the
first trace runs: no update, no random number, no loss. Grappler merges the operations that both traces share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tfra.fused_layer import STAND_IN, FusedTfraEmbedding

# TensorFlow marks these operations as stateful, but two runs in one step return equal values.
_REPEATABLE = {"ReadVariableOp", "ResourceGather", "LookupTableFindV2", "VarHandleOp", "HashTableV2", "Assert"}


def discover_ids(
    layers: Sequence[FusedTfraEmbedding], call: Callable[[], Any]
) -> list[tuple[FusedTfraEmbedding, tf.Tensor | None]]:
    """Returns (layer, ids <key dtype>[n]) for every layer call that `call()` makes, grouped by layer.

    The ids belong to the graph being traced. They are None where they depend on another layer's rows or on random
    numbers, because the first trace does not compute these.

    Raises:
      ValueError: A layer is called in a graph nested inside the model's.
    """
    graph = tf.compat.v1.get_default_graph()
    scratch = tf.__internal__.FuncGraph("which_ids")
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
    needed = [_ancestors(ids.op) for _, ids in calls]
    known = [ids for (_, ids), ops in zip(calls, needed) if all(map(_repeatable, ops))]
    names = {op.name for (_, ids), ops in zip(calls, needed) if ids in _IdentitySet(known) for op in ops}
    copied = iter(_copy(scratch, graph, names, known))
    return [(layer, next(copied) if ids in _IdentitySet(known) else None) for layer, ids in calls]


class _IdentitySet:
    """A set of tensors by identity, because `==` compares tensors element by element."""

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._ids = {id(tensor) for tensor in tensors}

    def __contains__(self, tensor: tf.Tensor) -> bool:
        return id(tensor) in self._ids


def _repeatable(op: tf.Operation) -> bool:
    if op.name.rsplit("/", 1)[-1].startswith(STAND_IN):
        return False
    return op.type in _REPEATABLE or not op.op_def.is_stateful


def _ancestors(op: tf.Operation) -> list[tf.Operation]:
    """Returns `op` and every operation that it depends on."""
    found, pending = {op.name: op}, [op]
    while pending:
        current = pending.pop()
        for dependency in [*(tensor.op for tensor in current.inputs), *current.control_inputs]:
            if dependency.name not in found:
                found[dependency.name] = dependency
                pending.append(dependency)
    return list(found.values())


def _copy(scratch: Any, graph: Any, names: set[str], wanted: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Copies the operations `names` from `scratch` into `graph` and returns the copies of the `wanted` tensors."""
    if not wanted:
        return []
    pruned = scratch.as_graph_def()
    nodes = [node for node in pruned.node if node.name in names]
    del pruned.node[:]
    pruned.node.extend(nodes)
    captured = {inside.name: outside for outside, inside in scratch.captures if inside.op.name in names}
    capture = getattr(graph, "capture", lambda tensor: tensor)
    return tf.graph_util.import_graph_def(
        pruned,
        input_map={name: capture(tensor) for name, tensor in captured.items()},
        return_elements=[tensor.name for tensor in wanted],
        name="fused_ids",
    )
