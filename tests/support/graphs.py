"""Looks into traced functions: counts of operations, and what depends on what."""

from collections import Counter


def count_ops(concrete_function) -> Counter:
    """How often each op type occurs in the graph of a ConcreteFunction and in all functions of its library."""
    graph = concrete_function.graph.as_graph_def()
    nodes = list(graph.node) + [node for function in graph.library.function for node in function.node_def]
    return Counter(node.op for node in nodes)


def ancestors(op) -> set:
    """All ops of the same graph that must have run before `op` does, by data or by a control dependency."""
    found, open_ends = set(), [op]
    while open_ends:
        last = open_ends.pop()
        for earlier in (*(tensor.op for tensor in last.inputs), *last.control_inputs):
            if earlier not in found:
                found.add(earlier)
                open_ends.append(earlier)
    return found
