"""Ways to call a FusedEmbedding that are not for its user: what schedules and exports make of the calls of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import features
from tf_fusedrec.embedding.batch_lookup import WaitingGradients
from tf_fusedrec.embedding.group_lookup import Context, GroupLookup
from tf_fusedrec.embedding.group_rows import AnswerOfGroup, Deferral


class Reached(BaseException):
    """A call came to a FusedEmbedding that interrupts it. No Exception: Keras makes new ones of those."""


# Of one call, by group; None for one that is looked up as ever.
Answer = Sequence[Optional[AnswerOfGroup]]
Rows = Callable[[str, tf.Tensor], tf.Tensor]


class CallModes:
    """Base of the layer: inside each context manager its calls do something else. One at a time of each kind."""

    name: str
    _deferral: Deferral | None
    _interrupts: bool
    _answers: list[Answer] | None  # of the coming calls, first call first
    _server: Rows | None
    _loss_scaler: Any
    _flat_features: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, features.FlatFeature]]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Past Keras' __setattr__, which would wrap and track what these hold.
        self.__dict__.update(_deferral=None, _interrupts=False, _answers=None, _server=None, _loss_scaler=None)

    def _set(self, **modes: Any) -> None:
        self.__dict__.update(modes)

    @contextlib.contextmanager
    def deferred(self, waiting: list[WaitingGradients], gate: tf.Operation | tf.Tensor | None) -> Iterator[None]:
        """For schedules: calls inside look up and exchange at once, but answer rows behind a gate and do not train.

        Args:
          waiting: gradients are put here, for lookup.apply_waiting, in place of an update.
          gate: what must have run before rows are handed on; no lookup and no exchange waits for it. None for nothing.
        """
        self._set(_deferral=Deferral(waiting, gate))
        try:
            yield
        finally:
            self._set(_deferral=None)

    @contextlib.contextmanager
    def loss_scaled_by(self, optimizer: Any) -> Iterator[None]:
        """For training steps whose loss is scaled: gradients of rows are taken off the scale that `optimizer` has then.

        Where one of them is not finite, on any rank, no row of its group is trained, and the layer's anchor gets such a
        gradient: the optimizer sees it, leaves out its step, too, and lowers the scale. Calls and the gradient must be
        inside. PipelinedModel does so by itself.

        Args:
          optimizer: a keras.mixed_precision.LossScaleOptimizer.
        """
        self._set(_loss_scaler=optimizer)
        try:
            yield
        finally:
            self._set(_loss_scaler=None)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """For schedules: a training call inside raises Reached(inputs, weights, mask) and does nothing else."""
        self._set(_interrupts=True)
        try:
            yield
        finally:
            self._set(_interrupts=False)

    @contextlib.contextmanager
    def answering(self, answers: Sequence[Answer]) -> Iterator[None]:
        """For schedules: training calls inside look nothing up; they take rows that are there, and train them.

        Args:
          answers: of the calls in their order, each as `grouped` gives their groups: the rows [G, D] of `bring` and
            their context by lane, or None for a group that is looked up as ever.

        Raises:
          ValueError: another number of training calls came, or one of other features. At run time
            InvalidArgumentError: one with another number of ids.
        """
        waiting = list(answers)
        self._set(_answers=waiting)
        try:
            yield
        finally:
            self._set(_answers=None)
        if waiting:
            raise ValueError(
                f"{len(waiting)} of {len(answers)} lookups of {self.name!r} that were made ahead had no training call "
                "to answer. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )

    @property
    def contexts_to_come(self) -> list[Context]:
        """Inside of `answering`: of the answers that no call has taken yet."""
        return [context for answer in self._answers or () for group in answer for _, context in group or ()]

    def _next_answer(self, grouped: Sequence[tuple[GroupLookup, list[features.FlatFeature]]]) -> Answer | None:
        answers = self._answers
        if answers is None:
            return None
        if not answers or len(answers[0]) != len(grouped):
            raise ValueError(
                f"{self.name!r} was called with other features, or more often in a training step, than was looked up "
                "ahead. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )
        return answers.pop(0)

    @contextlib.contextmanager
    def served_by(self, rows: Rows) -> Iterator[None]:
        """For exports: calls inside ask neither tables nor other ranks, but `rows` of (table name, ids <int64>[n])."""
        self._set(_server=rows)
        try:
            yield
        finally:
            self._set(_server=None)

    def _served(self, inputs: Mapping[str, Any], weights: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
        rows = self._server
        assert rows is not None
        outputs = {}
        for name, feature in self._flat_features(inputs, weights, mask).items():
            feature = features.pooled_by_tensorflow(feature)
            outputs[name] = features.restore_form(feature, rows(feature.config.table, feature.ids))
        return outputs
