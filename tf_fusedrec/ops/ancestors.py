"""Copies the operations that some tensors are computed from out of a scratch graph, and no others.

A model is traced into the scratch graph to see what it will look up. Only these operations ever run. Updates of moving
averages, losses and random numbers of that trace do not. Control inputs are left out: they order effects, which belong
to the trace that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf

# TensorFlow marks these operations as stateful, but two runs in one step return equal values.
READS = {
    "Assert",
    "HashTableV2",
    "LookupTableExportV2",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarHandleOp",
    "VarIsInitializedOp",
    "VariableShape",
}


def scratch_graph(name: str) -> Any:
    """A graph inside the current one. `copied` copies tensors out of it."""
    return tf.__internal__.FuncGraph(name)


def ancestors(scratch: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The operations of the scratch graph that compute some tensors, with all their ancestors."""
    operations = {tensor.op.name: tensor.op for tensor in tensors if _is_in(scratch, tensor)}
    pending = list(operations.values())
    while pending:
        for tensor in pending.pop().inputs:
            if tensor.op.name not in operations:
                operations[tensor.op.name] = tensor.op
                pending.append(tensor.op)
    return list(operations.values())


def stateful(scratch: Any, operations: Sequence[tf.Operation]) -> Iterator[tuple[str, str]]:
    """Yields (type, name) of each operation that may have an effect or a different value when it runs twice in a step.

    Args:
      scratch: The graph of the operations.
      operations: Operations such as `ancestors` returns. Functions that they call are searched, too.
    """
    functions = {function.signature.name: function for function in scratch.as_graph_def().library.function}

    def search(name: str, node: Any) -> Iterator[tuple[str, str]]:
        called = [functions[called] for called in _called(node, functions)]
        if not called and node.op not in READS and scratch.op_def_for_type(node.op).is_stateful:
            yield node.op, name
        for function in called:
            for inner in function.node_def:
                yield from search(f"{name}/{inner.name}", inner)

    for operation in operations:
        yield from search(operation.name, operation.node_def)


def written(scratch: Any) -> list[Any]:
    """The captured resources, such as handles of variables, that an operation of the scratch graph may change."""
    outer = {id(inside): outside for outside, inside in scratch.captures if inside.dtype == tf.resource}
    resources = []
    for operation in scratch.get_operations():
        try:
            read_only = operation.get_attr("_read_only_resource_inputs")  # of calls of functions
        except ValueError:
            read_only = range(len(operation.inputs)) if operation.type in READS else []
        resources += [outer[id(t)] for i, t in enumerate(operation.inputs) if id(t) in outer and i not in read_only]
    return resources


def copied(scratch: Any, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Tensors of the current graph that equal the tensors of a scratch graph inside it.

    Args:
      scratch: The graph to copy from.
      tensors: Its tensors. Tensors of other graphs are returned as they are.
      name: Scope of the copies.
    """
    graph = tf.compat.v1.get_default_graph()
    capture = getattr(graph, "capture", lambda tensor: tensor)
    captured = {inside.name: outside for outside, inside in scratch.captures}
    inside = [tensor for tensor in tensors if _is_in(scratch, tensor) and tensor.name not in captured]
    operations = {
        op.name: op for op in ancestors(scratch, inside) if not any(out.name in captured for out in op.outputs)
    }
    by_name: Mapping[str, tf.Tensor] = {}
    if operations:
        definition = scratch.as_graph_def()
        nodes = [node for node in definition.node if node.name in operations]
        needed = {tensor.name for op in operations.values() for tensor in op.inputs if tensor.name in captured}
        _keep(definition, nodes)
        inputs = {inner: capture(captured[inner]) for inner in sorted(needed)}
        # An import fails under control dependencies, so its inputs wait for them.
        inputs = {inner: x if x.dtype == tf.resource else tf.identity(x) for inner, x in inputs.items()}
        with tf.control_dependencies(None):
            elements = [tensor.name for tensor in inside]
            copies = tf.graph_util.import_graph_def(definition, inputs, elements, name)
        for tensor, copy in zip(inside, copies):
            copy.set_shape(tensor.shape)
        # TensorFlow forgets the functions of a graph with the graph, and the copies still call them.
        graph.fusedrec_scratch_graphs = [*getattr(graph, "fusedrec_scratch_graphs", []), scratch]
        by_name = {tensor.name: copy for tensor, copy in zip(inside, copies)}
    return [{**captured, **by_name}[tensor.name] if _is_in(scratch, tensor) else tensor for tensor in tensors]


def _is_in(graph: Any, tensor: tf.Tensor) -> bool:
    return getattr(tensor, "graph", None) is graph  # eager tensors have none


def _keep(definition: Any, nodes: Sequence[Any]) -> None:
    """Leaves these nodes, without control inputs, and the functions that they call in a GraphDef."""
    functions = {function.signature.name: function for function in definition.library.function}
    del definition.node[:]
    for node in nodes:
        data = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(data)
        node.attr.pop("_class", None)  # Colocation with operations that may be left out.
    definition.node.extend(nodes)
    called: dict[str, Any] = {}
    pending = list(nodes)
    while pending:
        for name in _called(pending.pop(), functions):
            if name not in called:
                called[name] = functions[name]
                pending.extend(functions[name].node_def)
    del definition.library.function[:]
    definition.library.function.extend(called.values())


def _called(node: Any, functions: Mapping[str, Any]) -> list[str]:
    """Names of the functions that a node calls."""
    names = [node.op]
    for value in node.attr.values():
        names += [value.func.name, *(function.name for function in value.list.func)]
    return [name for name in names if name in functions]
