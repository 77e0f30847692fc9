"""The steps of a FusedEmbedding's call that schedules, exports and scaled losses replace inside a context."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.embedding.lookup import Found, RowGradients, apply_gradients, look_up
from tf_fusedrec.embedding.routed_ids import LookupRequest
from tf_fusedrec.exchange import collectives


def train_now(requests: Sequence[LookupRequest], gradients: Sequence[RowGradients]) -> tf.Tensor:
    """Trains the tables of a group by its gradients. The default of CallSteps.train."""
    if keras.mixed_precision.global_policy().name == "mixed_float16":
        raise ValueError(
            f"tables {requests[0].lookup.table.names} cannot train under the policy mixed_float16 here: the loss is "
            "scaled, and rows are trained before the scale is taken off. Remedy: PipelinedModel, a loop inside "
            "`embedding.loss_scaled_by(optimizer)`, or the policy mixed_bfloat16."
        )
    apply_gradients(gradients)
    return tf.zeros([])


class CallSteps(NamedTuple):
    """The steps that each call of a layer makes."""

    # Computes the outputs from (inputs, weights, mask), in place of all other steps; None: the other steps run.
    answer: Callable[[Any, Any, Any], Any] | None = None
    # Finds the rows of each request, by group.
    look_up: Callable[[Sequence[Sequence[LookupRequest]]], list[list[Found]]] = look_up
    # Takes the requests and gradients of one group in all calls of a step; what it returns, <float32>[], is added to
    # the anchor's gradient.
    train: Callable[[Sequence[LookupRequest], Sequence[RowGradients]], tf.Tensor] = train_now
    # Changes the gradient <output dtype>[G, D] of the rows of each request, before `train`; None: it stays.
    gradient: Callable[[tf.Tensor], tf.Tensor] | None = None


class ReplaceableSteps:
    """Base of the layer: holds the steps of its calls."""

    name: str
    call_steps: CallSteps

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.__dict__["call_steps"] = CallSteps()  # Keras' __setattr__ would wrap and track the tuple.

    @contextlib.contextmanager
    def replacing(self, **steps: Any) -> Iterator[None]:
        """Calls inside run these fields of CallSteps in place of the layer's own. Contexts may be nested."""
        before = self.call_steps
        self.__dict__["call_steps"] = before._replace(**steps)
        try:
            yield
        finally:
            self.__dict__["call_steps"] = before

    def loss_scaled_by(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """For training steps whose loss is scaled: divides gradients of rows by the scale that `optimizer` has then.

        If one of them is not finite on any rank, no row of its group is trained. The layer's anchor then gets a
        gradient that is not finite. The optimizer sees it, skips its step, and lowers the scale. The calls and the
        gradient must be inside. PipelinedModel enters this context by itself.

        Args:
          optimizer: A keras.mixed_precision.LossScaleOptimizer.
        """
        return self.replacing(train=functools.partial(_train_unscaled, optimizer, self.name))


def _train_unscaled(
    optimizer: Any, layer_name: str, requests: Sequence[LookupRequest], gradients: Sequence[RowGradients]
) -> tf.Tensor:
    """Trains by gradients of a scaled loss if they are finite on all ranks. Returns 0 then, else infinity."""
    wide = [tf.cast(tf.convert_to_tensor(part.grads), tf.float32) / optimizer.loss_scale for part in gradients]
    bad = tf.add_n([tf.reduce_sum(tf.cast(~tf.math.is_finite(grad), tf.int64)) for grad in wide])
    name = f"{layer_name}.{requests[0].lookup.group.name}.{requests[0].call}.overflows"
    finite = tf.equal(collectives.all_reduce_sum(bad, name=name), 0)

    def train() -> tf.Tensor:
        apply_gradients([part._replace(grads=tf.cast(grad, part.grads.dtype)) for part, grad in zip(gradients, wide)])
        return tf.zeros([])

    return tf.cond(finite, train, lambda: tf.constant(np.inf, tf.float32))
