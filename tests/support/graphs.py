"""Inspects traced functions: counts of operations and dependencies between them."""

import pathlib
from collections import Counter


def count_ops(concrete_function) -> Counter:
    """Counts each op type in the graph of a ConcreteFunction and in all functions of its library."""
    graph = concrete_function.graph.as_graph_def()
    nodes = list(graph.node) + [node for function in graph.library.function for node in function.node_def]
    return Counter(node.op for node in nodes)


def ancestors(op) -> set:
    """Returns all ops of the same graph that must run before `op`, by data or control dependencies."""
    found, open_ends = set(), [op]
    while open_ends:
        last = open_ends.pop()
        for earlier in (*(tensor.op for tensor in last.inputs), *last.control_inputs):
            if earlier not in found:
                found.add(earlier)
                open_ends.append(earlier)
    return found


def made_from(op) -> set:
    """Returns all ops of the same graph whose values `op` gets, directly or not."""
    found, open_ends = set(), [op]
    while open_ends:
        new = {tensor.op for tensor in open_ends.pop().inputs} - found
        found |= new
        open_ends += new
    return found


def reduced_in_between(ops) -> list:
    """Returns the names of sums over ranks between two matrix products."""
    from tf_fusedrec.exchange.collectives import SUMS

    products = [op for op in ops if op.type == "MatMul"]
    waited_for = set().union(*[ancestors(op) for op in products])
    reduces = [op for op in ops if op.type in SUMS and op in waited_for]
    return [op.name for op in reduces if ancestors(op) & set(products)]


def without_fusions() -> None:
    """Makes bits of two graphs comparable, in a process of its own.

    TensorFlow fuses a product with its bias where the graph around it allows that, and the two forms round differently
    on some processors.
    """
    from tf_fusedrec import tf

    tf.config.optimizer.set_experimental_options({"remapping": False})


def saved_operations(folder) -> set:
    """Returns the types of all operations in the graphs of a SavedModel."""
    from tensorflow.core.protobuf import saved_model_pb2  # After tf_fusedrec, which chooses the Keras.

    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((pathlib.Path(folder) / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    return {node.op for nodes in (graph.node, *[f.node_def for f in graph.library.function]) for node in nodes}
