"""Compares the GPU kernels of ops with the CPU kernels: TensorFlow runs both on the CPU.

The GPU kernels are registered under the label "emulated", over the emulated launchers (emulation/op_kernels.cc). A
graph chooses its kernels by that label.
"""

from __future__ import annotations

import numpy as np

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.ops import _library

OPS = [name for name in dir(_library.library) if name.startswith("fusedrec_")]
LABELS = {"Fusedrec>" + "".join(map(str.capitalize, name.split("_")[1:])): "emulated" for name in OPS}
TENSORS = (np.ndarray, np.generic, tf.Tensor)

_functions: dict[tuple, tf.types.experimental.PolymorphicFunction] = {}  # traced once for all tables


def run_op(on_device, op, arguments, **more):
    """Runs op(*arguments) by one kind of kernels. Tensors and arrays are inputs of the graph."""
    tensors = [tf.convert_to_tensor(a) for a in arguments if isinstance(a, TENSORS)]
    rest = tuple(None if isinstance(a, TENSORS) else a for a in arguments)
    key = (op, on_device, rest, str(more), *(t.dtype for t in tensors))
    if key not in _functions:

        def call(*given):
            left = list(given)
            with tf.compat.v1.get_default_graph()._kernel_label_map(LABELS if on_device else {}):
                answer = op(*(left.pop(0) if a is None else a for a in rest), **more)
            return tf.constant(0) if answer is None or isinstance(answer, tf.Operation) else answer

        specs = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in tensors]
        _functions[key] = tf.function(call, input_signature=specs)
    return _functions[key](*tensors)


def same(ours, theirs, what):
    """Asserts equal bits."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    np.testing.assert_array_equal(*(np.atleast_1d(x).view(np.uint8) for x in (ours, theirs)), err_msg=what)


def refused(error, words, call):
    try:
        call()
    except error as said:
        assert words in str(said), f"{words!r} is not in: {said}"
    else:
        raise AssertionError(f"nothing was said of: {words}")
