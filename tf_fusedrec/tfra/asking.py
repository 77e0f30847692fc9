"""Asks a model, while its step is traced, which ids its layers will look up, so that all can travel together.

A model is traced twice: first into a graph of its own, in which the layers note their ids and answer stand-ins; what
computes the ids is then copied into the step's graph. Nothing else of the first trace runs: no update, no random
number, no loss. Equal operations of both traces become one when TensorFlow optimizes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tfra.layer import STAND_IN, FusedEmbedding

# Stateful by TensorFlow's book-keeping, but they answer the same twice in a step.
_REPEATABLE = {"ReadVariableOp", "ResourceGather", "LookupTableFindV2", "VarHandleOp", "HashTableV2", "Assert"}


def ids_of_calls(
    layers: Sequence[FusedEmbedding], call: Callable[[], Any]
) -> list[tuple[FusedEmbedding, tf.Tensor | None]]:
    """Ids <key dtype>[n] of every call of the layers that `call()` makes, in order; all in the graph being traced.

    None stands for ids that cannot be known beforehand: they depend on another layer's rows, or on random numbers.

    Raises:
      ValueError: a layer is called in a graph of its own inside the model's.
    """
    graph = tf.compat.v1.get_default_graph()
    scratch = tf.__internal__.FuncGraph("which_ids")
    for layer in layers:
        layer.member.asked = []
    try:
        with scratch.as_default():
            call()
        asked = [(layer, ids) for layer in layers for ids in layer.member.asked or []]
    finally:
        for layer in layers:
            layer.member.asked = None
    for layer, ids in asked:
        if ids.graph is not scratch:
            raise ValueError(
                f"Layer {layer.name!r} is called inside a tf.function, a tf.cond or a loop inside the model's call, so "
                f"its ids cannot travel with those of the others. Call it outside of these, or fuse(model, "
                f"leave=[{layer.name!r}])."
            )
    needed = [_ancestors(ids.op) for _, ids in asked]
    known = [ids for (_, ids), ops in zip(asked, needed) if all(map(_repeatable, ops))]
    names = {op.name for (_, ids), ops in zip(asked, needed) if ids in _Identity(known) for op in ops}
    copied = iter(_copy(scratch, graph, names, known))
    return [(layer, next(copied) if ids in _Identity(known) else None) for layer, ids in asked]


class _Identity:
    """Membership by identity: tensors compare element by element."""

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._ids = {id(tensor) for tensor in tensors}

    def __contains__(self, tensor: tf.Tensor) -> bool:
        return id(tensor) in self._ids


def _repeatable(op: tf.Operation) -> bool:
    if op.name.rsplit("/", 1)[-1].startswith(STAND_IN):
        return False
    return op.type in _REPEATABLE or not op.op_def.is_stateful


def _ancestors(op: tf.Operation) -> list[tf.Operation]:
    """`op` and all that it needs."""
    found, waiting = {op.name: op}, [op]
    while waiting:
        now = waiting.pop()
        for before in [*(tensor.op for tensor in now.inputs), *now.control_inputs]:
            if before.name not in found:
                found[before.name] = before
                waiting.append(before)
    return list(found.values())


def _copy(scratch: Any, graph: Any, names: set[str], wanted: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`wanted` of `scratch`, computed in `graph` by copies of the operations `names`."""
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
