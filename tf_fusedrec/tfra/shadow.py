"""The shadow variable, which upstream's optimizer trains, for several lookups of one step.

It gets the distinct keys of all of them, where upstream's keeps those of the last one only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tables.tfra import de


class SharedShadow:
    """The shadow variable of a group, filled by several lookups of one step.

    Args:
      name: of the layer or group, for messages.
      variable: upstream's ShadowVariable: its `ids` are the keys of the step, its value their rows, which the optimizer
        changes; then `update_op` writes them into the table.
    """

    def __init__(self, name: str, variable: Any):
        self._name, self._variable = name, variable
        # By graph, keys <int64>[W] of its lookups since its last update: while a graph is traced, order is known.
        self._keys: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        written = variable.update_op

        def update_op(v0: Any = None) -> Any:
            self._keys.pop(tf.compat.v1.get_default_graph(), None)  # lookups after an update are of the next step
            return written(v0)

        tracked = variable._track_optimizer_slots

        def track_own_slots(slots: list[Any]) -> None:
            # With new-style optimizers upstream reads and writes the slots of ALL shadows for each of them, k * M^2
            # finds and inserts a step. Slots of a shadow share its ids; the caller goes on with the list it gave.
            slots[:] = [slot for slot in slots if slot.ids is variable.ids]
            tracked(slots)

        variable.update_op, variable._track_optimizer_slots = update_op, track_own_slots

    def rows(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Callable[[], list[tf.Operation]]]:
        """Rows of distinct keys, as what the optimizer trains.

        Args:
          keys: <key dtype>[W], distinct.

        Returns:
          all rows of the step so far [W', D], W' >= W; place of each key among them <int32>[W]; and what a gradient
          must wait for: checks that the shadow still holds these keys.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = None if graph is None else self._keys.get(graph)
        place = tf.range(tf.size(keys))
        if before is not None:
            keys, index = tf.unique(tf.concat([before, keys], axis=0))  # first occurrence first: places stay
            place = index[tf.size(before) :]
        if graph is not None:
            self._keys[graph] = keys
        rows = tf.ensure_shape(de.shadow_ops.embedding_lookup(self._variable, keys), [None, self._variable.params.dim])
        return rows, place, lambda: self._still_holds(keys)

    def _still_holds(self, keys: tf.Tensor) -> list[tf.Operation]:
        now = self._variable.ids.read_value()
        message = (
            f"Layer {self._name!r} was looked up again, in another graph or eagerly, before the gradient of this "
            "lookup was taken; training would write rows of other keys. Make both lookups in one tf.function, or one "
            "of all ids."
        )
        long_enough = tf.debugging.assert_less_equal(tf.size(keys), tf.size(now), message=message)
        with tf.control_dependencies([] if long_enough is None else [long_enough]):
            equal = tf.debugging.assert_equal(now[: tf.size(keys)], keys, message=message)
        return [] if equal is None else [equal]
