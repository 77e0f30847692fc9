"""Tensors that one training step leaves for the next, inside the compiled function."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import tf


class StepState:
    """One structure of tensors: each step takes the structure that the step before has put in.

    Tensors pass by reference, without a copy. The state is a queue of one element, made outside of any graph, so that
    all traced functions share it.

    Args:
      example: Any structure of tensors, composite tensors and other values. `take` returns the other values of the
        example.
    """

    def __init__(self, example: Any):
        def spec(leaf: Any) -> Any:
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        self._structure = tf.nest.map_structure(spec, example)
        self._dtypes = [tensor.dtype for tensor in _tensors(example)]
        with tf.init_scope():
            self._queue = tf.queue.FIFOQueue(1, self._dtypes, name="step_state")
        self._held: Any = None  # the value between eager steps, which need no queue

    def put(self, value: Any) -> None:
        """Keeps a structure like the example's. The state must be empty.

        Raises:
          ValueError: the tensors have other dtypes than the example's.
        """
        tensors = _tensors(value)
        if [tensor.dtype for tensor in tensors] != self._dtypes:
            raise ValueError(
                f"a step left tensors of the dtypes {[tensor.dtype for tensor in tensors]} for the next step, and the "
                f"first step left {self._dtypes}. Remedy: let Schedule.step return a state of the same tensors always."
            )
        if tf.executing_eagerly():
            self._held = value
        else:
            self._queue.enqueue(tensors)

    def take(self) -> Any:
        """The value that `put` kept, in the form of the example. Waits for ever if the state is empty."""
        if tf.executing_eagerly():
            held, self._held = self._held, None
            return held
        taken = self._queue.dequeue()
        tensors = iter(taken if isinstance(taken, (list, tuple)) else [taken])
        parts = []
        for leaf in tf.nest.flatten(self._structure, expand_composites=True):
            if isinstance(leaf, tf.TypeSpec):
                spec, leaf = leaf, next(tensors)
                leaf.set_shape(spec.shape)
            parts.append(leaf)
        return tf.nest.pack_sequence_as(self._structure, parts, expand_composites=True)

    @property
    def full(self) -> bool:
        """True if a value is kept. Eager."""
        return self._held is not None or int(self._queue.size()) > 0

    def clear(self) -> None:
        """Drops the kept value. Eager."""
        self._held = None
        if self.full:
            self._queue.dequeue()


def _tensors(value: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]
