"""Keeps lookups out of TensorFlow's XLA clusters, and refuses them inside `jit_compile=True`.

The custom ops and TFRA's tables have no XLA kernels, and their sizes depend on the ids of the batch. A cluster of
TensorFlow's auto-clustering (`TF_XLA_FLAGS=--tf_xla_auto_jit=2`) needs sizes that are known when it is compiled, and
variables that keep their shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import in_xla_context, tf

_OUTSIDE = "_XlaCompile"  # the attribute of an operation that tf.xla.experimental.jit_scope sets


@contextlib.contextmanager
def outside_clusters(what: str) -> Iterator[None]:
    """Keeps the operations made inside out of XLA, and all operations of the graph on variables that change shape.

    Args:
      what: Caller for the error message, such as "layer 'name'".

    Raises:
      ValueError: XLA compiles the whole function that is being traced.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    if in_xla_context(graph):
        raise ValueError(
            f"{what} is called inside a function with jit_compile=True, and its lookups have no XLA kernels. Use "
            "model.compile(..., jit_compile=False); dense blocks may be compiled by "
            "tf.function(block, jit_compile=True)."
        )
    graph._attr_scope_map.setdefault(_OUTSIDE, lambda node: _keeps_out(graph, node))
    with tf.xla.experimental.jit_scope(compile_ops=False):
        yield


def _keeps_out(graph: Any, node: Any) -> tf.compat.v1.AttrValue | None:
    """Returns the attribute for operations on variables of unknown shape, such as the rows of a step, else None."""
    if "Variable" not in node.op and not node.op.startswith("Resource"):
        return None
    for name in node.input:
        if name.startswith("^"):
            continue
        handle, _, output = name.partition(":")
        tensor = graph.get_operation_by_name(handle).outputs[int(output or 0)]
        if tensor.dtype == tf.resource and not _keeps_its_shape(tensor):
            return tf.compat.v1.AttrValue(b=False)
    return None


def _keeps_its_shape(handle: tf.Tensor) -> bool:
    data = getattr(handle, "_handle_data", None)
    shapes = [tf.TensorShape(one.shape) for one in data.shape_and_type] if data is not None else []
    return all(shape.is_fully_defined() for shape in shapes)
