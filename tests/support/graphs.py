"""Counts operations of a traced function, inside nested functions too."""

from collections import Counter


def count_ops(concrete_function) -> Counter:
    """How often each op type occurs in the graph of a ConcreteFunction and in all functions of its library."""
    graph = concrete_function.graph.as_graph_def()
    nodes = list(graph.node) + [node for function in graph.library.function for node in function.node_def]
    return Counter(node.op for node in nodes)
