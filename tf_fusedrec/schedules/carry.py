"""Tensors that pass from one training step to the next, inside the compiled function."""

from __future__ import annotations

from typing import Any

from tf_fusedrec._tf_compat import tf


class Carry:
    """A place for one structure of tensors: a step takes out what the step before has put in.

    Tensors pass by reference: nothing is copied. It is a queue of one element, made outside of any graph, so that every
    traced function that uses it finds the same.

    Args:
      example: any structure of tensors, composite tensors and other values; the latter stay as they are here.
    """

    def __init__(self, example: Any):
        def spec(leaf: Any) -> Any:
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        self._structure = tf.nest.map_structure(spec, example)
        self._dtypes = [tensor.dtype for tensor in _tensors(example)]
        with tf.init_scope():
            self._queue = tf.queue.FIFOQueue(1, self._dtypes, name="carry")
        self._held: Any = None  # of eager steps, which need no queue

    def put(self, value: Any) -> None:
        """Keeps a structure like the example's; the place must be empty.

        Raises:
          ValueError: a structure of other tensors.
        """
        tensors = _tensors(value)
        if [tensor.dtype for tensor in tensors] != self._dtypes:
            raise ValueError(
                f"what one step leaves for the next must be made of the same tensors in every step: of {self._dtypes} "
                f"at first, now of {[tensor.dtype for tensor in tensors]}."
            )
        if tf.executing_eagerly():
            self._held = value
        else:
            self._queue.enqueue(tensors)

    def take(self) -> Any:
        """What was put in, in the form of the example. Something must be there: else it waits for ever."""
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
        """Whether something is there. Eager."""
        return self._held is not None or int(self._queue.size()) > 0

    def clear(self) -> None:
        """Drops what is there. Eager."""
        self._held = None
        if self.full:
            self._queue.dequeue()


def _tensors(value: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]
