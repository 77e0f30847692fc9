"""Training steps with read-ahead: all ranks read batches until no rank has one.

    step t     [batch t computes]   [batch t+1: what its schedule does ahead]   [batch t+lead is read; who has data?]

A rank whose data ends first takes part with batches of no samples. Ranks agree on whether any of them has data when a
batch is read. That is at least one step before it computes, so no step waits for the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.embedding import tables_in
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.model_state import check_equal
from tf_fusedrec.schedules.micro_batch import num_samples
from tf_fusedrec.schedules.schedule import Schedule
from tf_fusedrec.schedules.step_state import StepState

_LOG = logging.getLogger(__name__)


class Read(NamedTuple):
    """One batch, and whether any rank has data for this step."""

    data: Any
    goes_on: tf.Tensor  # <bool>[]


class Feed:
    """Replaces Keras' compiled training function: takes an iterator and returns the logs of its last step.

    A call makes `steps_at_once` steps of the model, or fewer if no rank has data for more. Batches have an unknown
    number of samples, whatever the data set says. After an error the next call begins anew. Where rows were loaded or
    set between two calls, the schedule's work is begun anew on the batches that are read.

    Args:
      model: A PipelinedModel; later changes of its schedule have no effect here.
      compiled: True if steps run as functions; else eagerly.

    Raises:
      tf.errors.OutOfRangeError: no rank has data any more.
    """

    def __init__(self, model: Any, *, compiled: bool):
        self._model = model
        self._schedule = model.schedule
        self._states: dict[str, StepState] = {}  # by the structure of the data set's batches
        self._iterator: Any = None
        self._goes_on = False
        self._replaced: list[int] = []  # of each table, when the schedule began its work
        self._made = self._told = 0  # steps, as many as on every other rank, and those before the call of `trained`
        with tf.init_scope(), tf.device("/CPU:0"):
            # Samples of this rank, and its steps with samples, since `trained` was called.
            self._trained = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="trained")

        def wrap(function: Callable) -> Callable:
            return tf.function(unconverted(function), reduce_retracing=True) if compiled else function

        self._start, self._step = wrap(self._start_reading), wrap(self._read_and_train)
        self._drains: dict[str, Callable] = {}
        self._restarts: dict[str, Callable] = {}
        self._wrap = wrap

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        iterator_before, self._iterator = self._iterator, None  # an error leaves none
        if iterator is not iterator_before:
            self.drain()
            self.forget()
            goes_on, content = self._start(iterator)
            self._goes_on = bool(goes_on)
            self._replaced = self._replacements()
            if content is not None and self._made == 0:
                warn_of_equal_data(int(content))
        elif self._goes_on and self._is_stale():
            self._begin_anew()
        if not self._goes_on:
            self.drain()
            self.forget()
            raise tf.errors.OutOfRangeError(None, None, "End of sequence: no rank has data any more.")
        for _ in range(self._model.steps_at_once):
            logs, goes_on = self._step(iterator)
            self._goes_on = bool(goes_on)
            self._made += 1
            if self._made & (self._made - 1) == 0:  # 1, 2, 4, ...: an optimizer may begin with a learning rate of 0
                check_equal(self._model, f"after step {self._made}", state=False)
            if not self._goes_on:
                break
        self._iterator = iterator
        return logs

    @property
    def has_trained(self) -> bool:
        """Whether ranks have made steps since the last call of `trained`; the same on all ranks."""
        return self._made > self._told

    def trained(self) -> tuple[int, int]:
        """Samples that this rank has trained since the last call, and its steps with samples. Eager."""
        self._told = self._made
        samples, steps = self._trained.numpy()
        self._trained.assign([0, 0])
        return int(samples), int(steps)

    def drain(self) -> None:
        """Lets the schedule finish updates that must be made before weights and tables are read. Collective."""
        if type(self._schedule).drain is Schedule.drain or self._is_stale():
            return
        self._change_states(self._drains, lambda _, state: self._schedule.drain(self._model, state))

    def _begin_anew(self) -> None:
        """Drops the schedule's work, gradients that wait included, and begins it on the batches that are read."""
        self._change_states(
            self._restarts, lambda reads, _: self._schedule.start(self._model, [read.data for read in reads])
        )
        self._replaced = self._replacements()

    def _replacements(self) -> list[int]:
        return [table.replaced for table in tables_in(self._model)]

    def _is_stale(self) -> bool:
        """Whether rows were loaded or set since the schedule looked some up and let gradients wait."""
        return self._replaced != self._replacements()

    def forget(self) -> None:
        """Drops batches that were read ahead, and the schedule's work on them."""
        self._iterator = None
        for step_state in self._states.values():
            step_state.clear()

    def _start_reading(self, iterator: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        reads = [self._read(iterator, i) for i in range(self._schedule.lead)]
        state = self._schedule.start(self._model, [read.data for read in reads])
        key = repr(iterator.element_spec)
        if key not in self._states:
            self._states[key] = StepState((reads, state))
        self._states[key].put((reads, state))
        content = content_of([read.data for read in reads]) if collectives.size() > 1 else None
        return reads[0].goes_on, content

    def _read_and_train(self, iterator: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        step_state = self._states[repr(iterator.element_spec)]
        reads, state = step_state.take()
        reads = [*reads, self._read(iterator, 0)]
        logs, state = self._schedule.step(self._model, [read.data for read in reads], state)
        step_state.put((reads[1:], state))
        if collectives.size() > 1:
            samples = num_samples(reads[0].data)
            self._trained.assign_add(tf.stack([samples, tf.cast(samples > 0, tf.int64)]))
        with tf.control_dependencies(tf.nest.flatten(logs)):
            self._model._train_counter.assign_add(1)  # Keras counts here what its callbacks and summaries ask for
        return logs, reads[1].goes_on

    def _change_states(self, functions: dict[str, Callable], change: Callable[[Sequence[Read], Any], Any]) -> None:
        """Replaces the schedule's state between two steps by `change` of the read batches and the state.

        Args:
          functions: The functions that a change has made before, by the structure of the batches.
          change: The change, traced.
        """

        def run(step_state: StepState) -> None:
            reads, state = step_state.take()
            step_state.put((reads, change(reads, state)))

        for key, step_state in self._states.items():
            if step_state.full:
                if key not in functions:
                    functions[key] = self._wrap(lambda step_state=step_state: run(step_state))
                functions[key]()

    def _read(self, iterator: Any, number: int) -> Read:
        with placing_ids(tables_in(self._model)):
            return read(iterator, f"{self._model.name}.has_data.{number}")


def content_of(batches: list[Any]) -> tf.Tensor:
    """<int64>[], a fingerprint of the batches; 0 if they have no samples."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    with tf.device("/CPU:0"):
        text = tf.strings.join([tf.io.serialize_tensor(leaf) for leaf in leaves if leaf is not None])
        return tf.where(num_samples(batches[0]) > 0, tf.strings.to_hash_bucket_fast(text, 2**63 - 1), 0)


def warn_of_equal_data(content: int) -> None:
    """Warns if two ranks begin with equal batches. Collective.

    Args:
      content: content_of this rank's first batches.
    """
    contents = collectives.all_gather_object(content)
    twins = [rank for rank, other in enumerate(contents) if other and contents.count(other) > 1]
    if twins and collectives.rank() == 0:
        _LOG.warning(
            "ranks %s begin with equal batches, so they train the same samples. Remedy: "
            "dataset.shard(fr.size(), fr.rank()) before shuffle and batch, or files of its own for each rank.", twins
        )  # fmt: skip


def unconverted(function: Callable) -> Callable:
    """The function without AutoGraph, whose conversion takes seconds. Keras still converts layers by itself.

    It must be called outside of any trace. tf.autograph.experimental.do_not_convert would keep Keras from converting.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=False)


def read(iterator: Any, name: str) -> Read:
    """The next batch of this rank; a batch of no samples after the last one. Traced, collective.

    Args:
      iterator: An iterator of a tf.data.Dataset.
      name: Name of the all-reduce, the same on all ranks.
    """
    optional = iterator.get_next_as_optional()
    here = optional.has_value()
    data = tf.cond(here, optional.get_value, lambda: no_samples(iterator.element_spec))
    return Read(data, collectives.all_reduce_sum(tf.cast(here, tf.int32), name=name) > 0)


def no_samples(element_spec: Any) -> Any:
    """A batch of no samples for a data set with this element_spec.

    Raises:
      ValueError: a tensor has no first dimension, or an unknown rank.
    """

    def empty(spec: Any) -> Any:
        rank = spec.shape.rank
        if not rank:
            raise ValueError(
                f"a batch must consist of tensors whose first dimension counts the samples, got {spec}. "
                "Remedy: Dataset.batch, or tensors of a known rank >= 1."
            )
        rest = [size or 0 for size in spec.shape[1:]]
        if isinstance(spec, tf.SparseTensorSpec):
            shape = tf.constant([0, *rest], tf.int64)
            return tf.SparseTensor(tf.zeros([0, rank], tf.int64), tf.zeros([0], spec.dtype), shape)
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = [size or 0 for size in spec.shape[1 + spec.ragged_rank :]]
            splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
            return tf.RaggedTensor.from_nested_row_splits(_zeros([0, *inner], spec.dtype), splits, validate=False)
        return _zeros([0, *rest], spec.dtype)

    return tf.nest.map_structure(empty, element_spec)


def _zeros(shape: list[int], dtype: tf.DType) -> tf.Tensor:
    return tf.reshape(tf.constant([], dtype), shape)
