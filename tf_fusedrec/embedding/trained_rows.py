"""Rows of the training calls of one step get their gradients, which make one update of the tables.

    anchor ─▶ join ─┬─▶ trained_rows of call 0 ─▶ rows
                    └─▶ trained_rows of call 1 ─▶ rows

Gradients run the other way. So the gradient of `join` runs once, after the gradients of all calls that the loss needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import recorded_by_tape, tf
from tf_fusedrec.embedding import anchor
from tf_fusedrec.embedding.features import restore_form
from tf_fusedrec.embedding.lookup import Found, RowGradients, by_group
from tf_fusedrec.embedding.routed_ids import LookupRequest

Train = Callable[[Sequence[LookupRequest], Sequence[RowGradients]], tf.Tensor]
Change = Callable[[tf.Tensor], tf.Tensor]
# TensorFlow's graphs for the gradients of a branch and of a loop's body.
_GRADIENTS_OF_BRANCHES = ("_CondGradFuncGraph", "_WhileBodyGradFuncGraph")


class _Part(NamedTuple):
    place: int  # among the lookups of the step
    request: LookupRequest
    gradients: RowGradients


class TrainingStep:
    """The training calls of a layer in one graph, or in eager mode, whose gradients come from one tape.

    Args:
      value: <float32>[], the layer's anchor.
      train: CallSteps.train.

    Attributes:
      value: As above.
      calls_by_group: Number of training calls so far that have looked up a group, by id of its GroupLookup.
    """

    def __init__(self, value: tf.Tensor, train: Train):
        self.value, self.calls_by_group = value, dict[int, int]()
        self._places = 0
        self._value: tf.Tensor | None  # None: the gradients have come
        # By graph, because TensorFlow may trace the gradients of one graph in several others.
        self._parts: dict[tf.Graph, list[_Part]] = {}

        @tf.custom_gradient
        def join(value: tf.Tensor):
            @tf.autograph.experimental.do_not_convert
            def update(_: tf.Tensor) -> tf.Tensor:
                self._value, graph = None, tf.compat.v1.get_default_graph()
                parts = sorted(self._parts.pop(graph), key=lambda part: part.place)
                if type(graph).__name__ in _GRADIENTS_OF_BRANCHES:
                    raise ValueError(
                        f"tables {parts[0].request.lookup.table.names} were looked up for training inside a tf.cond or "
                        "tf.while_loop that does not compute the gradient, and a branch cannot train them. Remedy: "
                        "call the FusedEmbedding outside of it."
                    )

                def apply() -> tf.Tensor:
                    total = anchor.gradient(value)
                    for numbers in by_group([part.request.lookup for part in parts]):
                        of_group = [parts[i] for i in numbers]
                        total += train([part.request for part in of_group], [part.gradients for part in of_group])
                    return total

                # The gradient of a tf.function orders no ops, and drops those that its result does not need.
                of_function = getattr(graph, "name", "").startswith("__backward_")
                return tf.function(apply, autograph=False)() if of_function else apply()

            return tf.identity(value), update

        self._value = join(value)

    def takes_calls(self) -> bool:
        """Returns whether the gradients of a call that is made now come together with the gradients of this step."""
        if self._value is None:
            return False
        recorded = recorded_by_tape(self._value)
        return not tf.executing_eagerly() if recorded is None else recorded

    def trained(
        self, requests: Sequence[LookupRequest], found: Sequence[Found], change: Change | None
    ) -> list[tf.Tensor]:
        """The rows of the lookups of one group in a call, whose gradients train the group's tables."""
        first, self._places = self._places, self._places + len(requests)
        group = id(requests[0].lookup)
        self.calls_by_group[group] = self.calls_by_group.get(group, 0) + 1

        @tf.custom_gradient
        def forward(_: tf.Tensor):
            @tf.autograph.experimental.do_not_convert
            def backward(*grads: tf.Tensor) -> tf.Tensor:
                parts = self._parts.setdefault(tf.compat.v1.get_default_graph(), [])
                grads = grads if change is None else tuple(change(grad) for grad in grads)
                for place, request, one, grad in zip(itertools.count(first), requests, found, grads):
                    parts.append(_Part(place, request, RowGradients(one.context, grad)))
                return tf.zeros([])

            return [one.rows for one in found], backward

        return forward(self._value)


def trained_rows(
    requests: Sequence[LookupRequest], found: Sequence[Found], step: TrainingStep | None, change: Change | None
) -> dict[str, Any]:
    """Rows by feature, in the feature's form. Their gradient trains the group's tables.

    Args:
      requests: The lookups of one group in a call, at least one.
      found: The rows of each request.
      step: The training step of the call; None: no lookup of the call trains.
      change: CallSteps.gradient.
    """
    if step is not None and requests[0].training:
        rows_of_all = step.trained(requests, found, change)
    else:
        rows_of_all = [tf.stop_gradient(one.rows) for one in found]
    outputs: dict[str, Any] = {}
    for request, one, rows in zip(requests, found, rows_of_all):
        numbers = one.context.routed.fused.feature_bags
        parts = tf.split(rows, numbers) if len(request.features) > 1 else [rows]
        for feature, part in zip(request.features, parts):
            part.set_shape([None, rows.shape[1]])
            outputs[feature.config.name] = restore_form(feature, part)
    return outputs
