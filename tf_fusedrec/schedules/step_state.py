"""Tensors that one training step leaves for the next, inside the compiled function."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

from tf_fusedrec._tf_compat import tf

T = TypeVar("T")


class StepState:
    """One structure of tensors: each step takes the structure that the step before has put in.

    Tensors pass by reference, without a copy. The state is at most two queues of one element, made outside of any
    graph, so that all traced functions share them. A queue on a device would take tensors of host memory there, and the
    next step would wait until they are back. So tensors that were made under tf.device("/CPU:0"), and strings, have a
    queue in host memory.

    Args:
      example: Any structure of tensors, composite tensors and other values. `take` returns the other values of the
        example.
    """

    def __init__(self, example: Any):
        def spec(leaf: Any) -> Any:
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        self._structure = tf.nest.map_structure(spec, example)
        self._dtypes = [tensor.dtype for tensor in _tensors(example)]
        self._on_host = [_is_on_host(tensor) for tensor in _tensors(example)]
        self._queues: dict[bool, tf.queue.FIFOQueue] = {}  # by whether its tensors are in host memory
        with tf.init_scope():
            for on_host in sorted(set(self._on_host)):
                with _placed(on_host):
                    self._queues[on_host] = tf.queue.FIFOQueue(1, self._those(self._dtypes, on_host), name="step_state")
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
            for on_host, queue in self._queues.items():
                with _placed(on_host):
                    queue.enqueue(self._those(tensors, on_host))

    def take(self) -> Any:
        """The value that `put` kept, in the form of the example. Waits for ever if the state is empty."""
        if tf.executing_eagerly():
            held, self._held = self._held, None
            return held
        of_queues = {}
        for on_host, queue in self._queues.items():
            with _placed(on_host):
                taken = queue.dequeue()
            of_queues[on_host] = iter(taken if isinstance(taken, (list, tuple)) else [taken])
        tensors = iter([next(of_queues[on_host]) for on_host in self._on_host])
        parts = []
        for leaf in tf.nest.flatten(self._structure, expand_composites=True):
            if isinstance(leaf, tf.TypeSpec):
                spec, leaf = leaf, next(tensors)
                leaf.set_shape(spec.shape)
            parts.append(leaf)
        return tf.nest.pack_sequence_as(self._structure, parts, expand_composites=True)

    @property
    def full(self) -> bool:
        """True if a whole value is kept. Eager."""
        return self._held is not None or all(int(queue.size()) > 0 for queue in self._queues.values())

    def clear(self) -> None:
        """Drops the kept value. Eager."""
        self._held = None
        for queue in self._queues.values():
            if int(queue.size()) > 0:  # a step that failed may have filled or emptied one of them
                queue.dequeue()

    def _those(self, of_tensors: Sequence[T], on_host: bool) -> list[T]:
        """The items whose tensors have this queue."""
        return [one for one, its_place in zip(of_tensors, self._on_host) if its_place == on_host]


def _is_on_host(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.string or tf.DeviceSpec.from_string(tensor.device or "").device_type == "CPU"


def _placed(on_host: bool) -> contextlib.AbstractContextManager:
    return tf.device("/CPU:0") if on_host else contextlib.nullcontext()


def _tensors(value: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]
