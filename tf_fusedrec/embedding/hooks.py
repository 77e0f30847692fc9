"""Context managers in which a FusedEmbedding's calls do something else: for schedules, exports and scaled losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding.group_lookup import Context
from tf_fusedrec.embedding.inputs import FlatFeature
from tf_fusedrec.embedding.lookup import RowGradients
from tf_fusedrec.embedding.outputs import pooled_by_tensorflow, restore_form
from tf_fusedrec.embedding.trained_rows import Deferral, RowsOfGroup


class Reached(BaseException):
    """A call reached a FusedEmbedding that interrupts it.

    A BaseException, because Keras re-raises every Exception as a new one.
    """


# The rows of each group in one call; None for a group that the call looks up itself.
SuppliedRows = Sequence[Optional[RowsOfGroup]]
Rows = Callable[[str, tf.Tensor], tf.Tensor]


class CallModes:
    """Base of the layer. Inside each context manager its calls do something else. Kinds may be nested."""

    name: str
    _deferral: Deferral | None
    _interrupts: bool
    _supplied: list[SuppliedRows] | None  # for the coming calls, first call first
    _server: Rows | None
    _loss_scaler: Any

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Keras' __setattr__ would wrap and track these values.
        self.__dict__.update(_deferral=None, _interrupts=False, _supplied=None, _server=None, _loss_scaler=None)

    def _set(self, **modes: Any) -> None:
        self.__dict__.update(modes)

    @contextlib.contextmanager
    def deferred(self, waiting: list[RowGradients], gate: tf.Operation | tf.Tensor | None) -> Iterator[None]:
        """For schedules: calls inside collect gradients instead of training, and hand rows on behind a gate.

        Args:
          waiting: Collects the gradients, for lookup.apply_gradients.
          gate: Runs before rows are handed on; no lookup and no exchange waits for it. None: no gate.
        """
        self._set(_deferral=Deferral(waiting, gate))
        try:
            yield
        finally:
            self._set(_deferral=None)

    @contextlib.contextmanager
    def loss_scaled_by(self, optimizer: Any) -> Iterator[None]:
        """For training steps whose loss is scaled: divides gradients of rows by the scale that `optimizer` has then.

        If one of them is not finite on any rank, no row of its group is trained, and the layer's anchor gets a gradient
        that is not finite. The optimizer sees it, skips its step, and lowers the scale. The calls and the gradient must
        be inside. PipelinedModel enters this context by itself.

        Args:
          optimizer: A keras.mixed_precision.LossScaleOptimizer.
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
    def supplied_with(self, rows: Sequence[SuppliedRows]) -> Iterator[None]:
        """For schedules: training calls inside take these rows instead of looking rows up, and train them.

        Args:
          rows: For each call in order, and in it for each group of `requests`: rows [G, D] of `bring` and their
            context by request, or None for a group that the call looks up itself.

        Raises:
          ValueError: another number of training calls came, or a call had other features.
          InvalidArgumentError: at run time, a call had another number of ids.
        """
        left = list(rows)
        self._set(_supplied=left)
        try:
            yield
        finally:
            self._set(_supplied=None)
        if left:
            raise ValueError(
                f"{len(left)} of {len(rows)} lookups of {self.name!r} that were made ahead had no training call "
                "to take them. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )

    @property
    def contexts_to_come(self) -> list[Context]:
        """Inside `supplied_with`: contexts of the rows that no call has taken yet."""
        return [context for call in self._supplied or () for group in call for _, context in group or ()]

    def _next_supplied(self, groups: int) -> SuppliedRows:
        """Rows for a training call with so many groups; None for each group outside of `supplied_with`."""
        supplied = self._supplied
        if supplied is None:
            return [None] * groups
        if not supplied or len(supplied[0]) != groups:
            raise ValueError(
                f"{self.name!r} was called with other features, or more often in a training step, than was looked up "
                "ahead. Remedy: embedding_inputs of the model must give the calls that a training step makes."
            )
        return supplied.pop(0)

    @contextlib.contextmanager
    def served_by(self, rows: Rows) -> Iterator[None]:
        """For exports: calls inside take their rows from rows(table name, ids <int64>[n]), not from tables or ranks."""
        self._set(_server=rows)
        try:
            yield
        finally:
            self._set(_server=None)

    def _served(self, flat: Mapping[str, FlatFeature], rows: Rows) -> dict[str, Any]:
        features = {name: pooled_by_tensorflow(feature) for name, feature in flat.items()}
        return {
            name: restore_form(feature, rows(feature.config.table, feature.ids)) for name, feature in features.items()
        }
