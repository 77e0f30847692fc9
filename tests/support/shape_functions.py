"""Runs shape functions in a graph with placeholders of partly unknown shape."""

from tf_fusedrec._tf_compat import tf


def inferred(op, *inputs):
    """Returns the static shapes of `op`'s outputs as lists. Inputs are (dtype, shape) pairs."""
    with tf.Graph().as_default():
        outputs = op(*[tf.compat.v1.placeholder(dtype, shape) for dtype, shape in inputs])
        flat = tf.nest.flatten(outputs)
        return [None if t.shape.rank is None else t.shape.as_list() for t in flat]
