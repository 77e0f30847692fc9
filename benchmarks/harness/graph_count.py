"""Counts the nodes of one op in a traced graph, with those in function bodies."""

from collections.abc import Iterator

from tf_fusedrec import tf


def _called(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Names of the functions that a node calls by its op or by an attribute (PartitionedCall, While, If)."""
    yield node.op
    for attribute in node.attr.values():
        if attribute.HasField("func"):
            yield attribute.func.name
        for function in attribute.list.func:
            yield function.name


def count_nodes(graph: tf.compat.v1.GraphDef, op: str) -> int:
    """Counts the nodes with the op `op`. A function's nodes count once for every node that calls it."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}

    def count(nodes) -> int:
        own = sum(node.op == op for node in nodes)
        return own + sum(count(bodies[name]) for node in nodes for name in _called(node) if name in bodies)

    return count(graph.node)
