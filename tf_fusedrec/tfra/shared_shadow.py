"""Lets several lookups of one step share the shadow variable, which upstream's optimizer trains.

The shared shadow holds the distinct keys of all lookups. Upstream's holds the keys of the last lookup only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.tables.tfra_library import de


class SharedShadow:
    """The shadow variable of a group, filled by several lookups of one step.

    Args:
      name: Name of the layer or group, for messages.
      variable: Upstream's ShadowVariable. Its `ids` are the step's keys, its value their rows. The optimizer changes
        the value, and `update_op` writes it into the table.
    """

    def __init__(self, name: str, variable: Any):
        self._name, self._variable = name, variable
        # By graph, keys <int64>[W] of the lookups since the last update. The order of tracing is the order of lookups.
        self._keys: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        written = variable.update_op

        def update_op(v0: Any = None) -> Any:
            self._keys.pop(tf.compat.v1.get_default_graph(), None)  # Lookups after an update belong to the next step.
            return written(v0)

        tracked = variable._track_optimizer_slots

        def track_own_slots(slots: list[Any]) -> None:
            # With new-style optimizers upstream reads and writes the slots of ALL shadows once per shadow: k * M^2
            # finds and inserts a step. The slots of one shadow share its ids. The caller uses the list in place.
            slots[:] = [slot for slot in slots if slot.ids is variable.ids]
            tracked(slots)

        variable.update_op, variable._track_optimizer_slots = update_op, track_own_slots

    def rows(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Callable[[], list[tf.Operation]]]:
        """Looks up distinct keys as rows that the optimizer trains.

        Args:
          keys: <key dtype>[W], distinct.

        Returns:
          rows: [W', D], all rows of the step so far, W' >= W.
          position: <int32>[W], index of each key's row in `rows`.
          still_held: Function that returns checks that the shadow still holds these keys. A gradient waits for them.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = None if graph is None else self._keys.get(graph)
        position = tf.range(tf.size(keys))
        if before is not None:
            # tf.unique keeps the order of first occurrences, so earlier positions stay valid.
            keys, index = tf.unique(tf.concat([before, keys], axis=0))
            position = index[tf.size(before) :]
        if graph is not None:
            self._keys[graph] = keys
        rows = tf.ensure_shape(de.shadow_ops.embedding_lookup(self._variable, keys), [None, self._variable.params.dim])
        return rows, position, lambda: self._still_holds(keys)

    def _still_holds(self, keys: tf.Tensor) -> list[tf.Operation]:
        now = self._variable.ids.read_value()
        message = (
            f"Layer {self._name!r} was looked up again, in another graph or eagerly, before the gradient of this "
            "lookup was taken; training would write rows of other keys. Make both lookups in one tf.function, or "
            "look up all ids at once."
        )
        long_enough = tf.debugging.assert_less_equal(tf.size(keys), tf.size(now), message=message)
        with tf.control_dependencies([] if long_enough is None else [long_enough]):
            equal = tf.debugging.assert_equal(now[: tf.size(keys)], keys, message=message)
        return [] if equal is None else [equal]
