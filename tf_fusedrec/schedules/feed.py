"""Batches for the steps of fit, evaluate and predict. All ranks make equally many steps.

    step t     [batch t computes]   [batch t+1: what its schedule does ahead]   [batch t+lead is read; who has data?]

A rank that has no more data takes part with batches of no samples. Ranks agree on whether any of them has data when a
batch is read. Training reads a batch at least one step before it computes, so no step waits for the result.

Feed is the training function; EqualSteps makes steps of evaluate and predict, which look at a batch before it runs.
StepState passes tensors from one step to the next. legacy_inputs.py and keras_3_inputs.py let Keras iterate equally
often on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tf_fusedrec._tf_compat import keras, keras_api, tf, unconverted
from tf_fusedrec.data.batches import no_samples, num_samples
from tf_fusedrec.embedding import tables_in
from tf_fusedrec.embedding.features import placing_ids
from tf_fusedrec.exchange import collectives
from tf_fusedrec.exchange.model_state import check_equal
from tf_fusedrec.schedules.schedule import Schedule

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Read(NamedTuple):
    """One batch, and whether any rank has data for this step."""

    data: Any
    goes_on: tf.Tensor  # <bool>[]


def steps_at_once(model: Any) -> int:
    """Number of steps between two callbacks: steps_per_execution of compile, or the steps left of an epoch if fewer."""
    return int(model.steps_per_execution or 1)


def iterator_of(source: Any) -> tf.data.Iterator:
    """The iterator itself; for train_on_batch and test_on_batch of Keras 3, an iterator of their generator's batch."""
    if isinstance(source, tf.data.Iterator):
        return source
    return iter(tf.data.Dataset.from_tensors(keras.utils.pack_x_y_sample_weight(*next(source))))


def direct_step(model: Any) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Keras 3's training function of one rank, without its Optional of the logs, which costs two eager ops a step."""
    of_keras = model.train_function  # train_on_batch passes no iterator of a data set

    def read_and_train(iterator: Any) -> dict[str, tf.Tensor]:
        data = tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, next(iterator)
        )
        return model.train_step(data)

    step = tf.function(unconverted(read_and_train), reduce_retracing=True)
    return lambda source: (step if isinstance(source, tf.data.Iterator) else of_keras)(source)


class Feed:
    """Replaces Keras' compiled training function: takes an iterator and returns the logs of its last step.

    A call makes steps_at_once(model) steps, or fewer if no rank has data for more. Batches have an unknown
    number of samples, whatever the data set says. After an error the next call starts over. If rows were loaded or set
    between two calls, the schedule starts over on the batches that are read.

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
        self._steps = self._reported_steps = 0  # of every rank, and those before the last call of `trained`
        with tf.init_scope(), tf.device("/CPU:0"):
            # Samples of this rank, and its steps with samples, since the last call of `trained`.
            self._trained = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="trained")

        def wrap(function: Callable) -> Callable:
            return tf.function(unconverted(function), reduce_retracing=True) if compiled else function

        self._start, self._step = wrap(self._start_reading), wrap(self._read_and_train)
        self._changes: dict[tuple[str, str], Callable] = {}  # by name and the structure of the batches
        self._wrap = wrap

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        iterator = iterator_of(iterator)
        iterator_before, self._iterator = self._iterator, None  # an error leaves none
        if iterator is not iterator_before:
            self.drain()
            self.forget()
            goes_on, content = self._start(iterator)
            self._goes_on = bool(goes_on)
            self._replaced = self._replacements()
            if content is not None and self._steps == 0:
                _warn_of_equal_data(int(content))
        elif self._goes_on and self._is_stale():
            # Drops the schedule's work, gradients that wait included, and begins it on the batches that are read.
            self._change_states(
                "restart", lambda reads, _: self._schedule.start(self._model, [read.data for read in reads])
            )
            self._replaced = self._replacements()
        if not self._goes_on:
            self.drain()
            self.forget()
            raise tf.errors.OutOfRangeError(None, None, "End of sequence: no rank has data any more.")
        for _ in range(steps_at_once(self._model)):
            logs, goes_on = self._step(iterator)
            self._goes_on = bool(goes_on)
            self._steps += 1
            if self._steps & (self._steps - 1) == 0:  # 1, 2, 4, ...: an optimizer may begin with a learning rate of 0
                check_equal(self._model, f"after step {self._steps}", state=False)
            if not self._goes_on:
                break
        self._iterator = iterator
        return logs

    @property
    def has_trained(self) -> bool:
        """Whether ranks have made steps since the last call of `trained`; the same on all ranks."""
        return self._steps > self._reported_steps

    def trained(self) -> tuple[int, int]:
        """Samples that this rank has trained since the last call, and its steps with samples. Eager."""
        self._reported_steps = self._steps
        samples, steps = self._trained.numpy()
        self._trained.assign([0, 0])
        return int(samples), int(steps)

    def drain(self) -> None:
        """Lets the schedule finish updates that must be made before weights and tables are read. Collective."""
        if (self._schedule.stages.update or type(self._schedule).drain is not Schedule.drain) and not self._is_stale():
            self._change_states("drain", lambda _, state: self._schedule.drain(self._model, state))

    def forget(self) -> None:
        """Drops batches that were read ahead, and the schedule's work on them."""
        self._iterator = None
        for step_state in self._states.values():
            step_state.clear()

    def _replacements(self) -> list[int]:
        return [table.replaced for table in tables_in(self._model)]

    def _is_stale(self) -> bool:
        """Whether rows were loaded or set since the schedule looked some up and let gradients wait."""
        return self._replaced != self._replacements()

    def _start_reading(self, iterator: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        reads = [self._read(iterator, i) for i in range(self._schedule.stages.lead)]
        state = self._schedule.start(self._model, [read.data for read in reads])
        key = repr(iterator.element_spec)
        if key not in self._states:
            self._states[key] = StepState((reads, state))
        self._states[key].put((reads, state))
        content = _content_of([read.data for read in reads]) if collectives.size() > 1 else None
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
            keras_api.count_step(self._model)
        return logs, reads[1].goes_on

    def _change_states(self, name: str, change: Callable[[Sequence[Read], Any], Any]) -> None:
        """Replaces the schedule's state between two steps by `change` of the reads and the state. Traced once."""

        def run(step_state: StepState) -> None:
            reads, state = step_state.take()
            step_state.put((reads, change(reads, state)))

        for key, step_state in self._states.items():
            if step_state.full:
                if (name, key) not in self._changes:
                    self._changes[name, key] = self._wrap(lambda step_state=step_state: run(step_state))
                self._changes[name, key]()

    def _read(self, iterator: Any, number: int) -> Read:
        with placing_ids(tables_in(self._model)):
            return _read(iterator, f"{self._model.name}.has_data.{number}")


def _read(iterator: Any, name: str) -> Read:
    """The next batch of this rank; a batch of no samples after the last one. Traced, collective by `name`."""
    optional = iterator.get_next_as_optional()
    has_data = optional.has_value()
    data = tf.cond(has_data, optional.get_value, lambda: no_samples(iterator.element_spec))
    return Read(data, collectives.all_reduce_sum(tf.cast(has_data, tf.int32), name=name) > 0)


def _content_of(batches: list[Any]) -> tf.Tensor:
    """<int64>[], a fingerprint of the batches; 0 if they have no samples."""
    leaves = tf.nest.flatten(batches, expand_composites=True)
    with tf.device("/CPU:0"):
        text = tf.strings.join([tf.io.serialize_tensor(leaf) for leaf in leaves if leaf is not None])
        return tf.where(num_samples(batches[0]) > 0, tf.strings.to_hash_bucket_fast(text, 2**63 - 1), 0)


def _warn_of_equal_data(content: int) -> None:
    """Warns if two ranks begin with equal batches; `content` is this rank's _content_of. Collective."""
    contents = collectives.all_gather_object(content)
    twins = [rank for rank, value in enumerate(contents) if value and contents.count(value) > 1]
    if twins and collectives.rank() == 0:
        _LOG.warning(
            "ranks %s begin with equal batches, so they train the same samples. Use "
            "dataset.shard(fr.size(), fr.rank()) before shuffle and batch, or different files for each rank.", twins
        )  # fmt: skip


class StepState:
    """One structure of tensors: each step takes the structure that the step before has put in.

    Tensors pass by reference, without a copy. The state is at most two queues of one element, made outside of any
    graph, so that all traced functions share them. A queue on a device would copy host tensors to the device, and the
    next step would wait until they are back. So tensors that were made under tf.device("/CPU:0"), and strings, have a
    queue in host memory. Constants are those of the example.
    """

    def __init__(self, example: Any):
        def spec(leaf: Any) -> Any:
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        self._structure = tf.nest.map_structure(spec, example)
        self._dtypes = [tensor.dtype for tensor in _tensors(example)]
        self._on_host = [
            tensor.dtype == tf.string or tf.DeviceSpec.from_string(tensor.device or "").device_type == "CPU"
            for tensor in _tensors(example)
        ]
        self._queues: dict[bool, tf.queue.FIFOQueue] = {}  # by whether its tensors are in host memory
        with tf.init_scope():
            for on_host in sorted(set(self._on_host)):
                with _placed(on_host):
                    self._queues[on_host] = tf.queue.FIFOQueue(
                        1, self._of_queue(self._dtypes, on_host), name="step_state"
                    )
        self._eager_value: Any = None  # between eager steps, which need no queue

    def put(self, value: Any) -> None:
        """Keeps a structure like the example's. The state must be empty. Raises ValueError for other dtypes."""
        tensors = _tensors(value)
        if [tensor.dtype for tensor in tensors] != self._dtypes:
            raise ValueError(
                f"a step left tensors of the dtypes {[tensor.dtype for tensor in tensors]} for the next step, and the "
                f"first step left {self._dtypes}. Let Schedule.step return a state of the same tensors always."
            )
        if tf.executing_eagerly():
            self._eager_value = value
        else:
            for on_host, queue in self._queues.items():
                with _placed(on_host):
                    queue.enqueue(self._of_queue(tensors, on_host))

    def take(self) -> Any:
        """The value that `put` kept, in the form of the example. Waits for ever if the state is empty."""
        if tf.executing_eagerly():
            value, self._eager_value = self._eager_value, None
            return value
        tensors_of = {}
        for on_host, queue in self._queues.items():
            with _placed(on_host):
                taken = queue.dequeue()
            tensors_of[on_host] = iter(taken if isinstance(taken, (list, tuple)) else [taken])
        tensors = iter([next(tensors_of[on_host]) for on_host in self._on_host])
        leaves = []
        for leaf in tf.nest.flatten(self._structure, expand_composites=True):
            if isinstance(leaf, tf.TypeSpec):
                spec, leaf = leaf, next(tensors)
                leaf.set_shape(spec.shape)
            leaves.append(leaf)
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)

    @property
    def full(self) -> bool:
        """True if a complete value is kept. Eager."""
        return self._eager_value is not None or all(int(queue.size()) > 0 for queue in self._queues.values())

    def clear(self) -> None:
        """Drops the kept value. Eager."""
        self._eager_value = None
        for queue in self._queues.values():
            if int(queue.size()) > 0:  # a step that failed may have filled or emptied one of them
                queue.dequeue()

    def _of_queue(self, items: Sequence[T], on_host: bool) -> list[T]:
        """The items, by tensor, that belong to this queue."""
        return [item for item, item_on_host in zip(items, self._on_host) if item_on_host == on_host]


def _placed(on_host: bool) -> contextlib.AbstractContextManager:
    return tf.device("/CPU:0") if on_host else contextlib.nullcontext()


def _tensors(value: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(leaf)]


class EqualSteps:
    """Replaces Keras' compiled test or predict function: takes an iterator and returns the result of its steps.

    A call makes steps_at_once(model) steps, or fewer if no rank has data for more.

    Args:
      name: Name of the all-reduce that asks which ranks have data.
      step: The step of one batch, of any number of samples.
      put_together: The function from the steps' results to the result of a call: `last` or `concatenated`.
      compiled: True if steps run as functions; else eagerly.

    Raises:
      tf.errors.OutOfRangeError: no rank has data any more.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        step: Callable[[Any], Any],
        put_together: Callable[[list[Any]], Any],
        *,
        compiled: bool,
    ):
        self._model, self._step, self._put_together, self._compiled = model, step, put_together, compiled
        self._name = name
        self._read = self._wrap(lambda iterator: _read(iterator, name))
        self._steps: dict[str, Callable] = {}  # by the structure of the batches
        self._empty: tuple[Any, Any] = (None, None)  # an iterator, and no samples of the form of its last result

    def __call__(self, source: Any) -> Any:
        iterator, batches = self._batches(source)
        key = repr(getattr(iterator, "element_spec", None))
        if key not in self._steps:
            options: dict[str, Any] = {"reduce_retracing": True}
            if iterator is not None:
                options = {"input_signature": [tf.nest.map_structure(_of_any_size, iterator.element_spec)]}
            self._steps[key] = self._wrap(self._step, **options)
        results: list[Any] = []
        for batch in itertools.islice(batches, steps_at_once(self._model)):
            result = self._steps[key](batch)
            if self._put_together is concatenated:
                result = self._of_last_form(result, iterator, int(num_samples(batch)))
            results.append(result)
        if not results:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence: no rank has data any more.")
        return self._put_together(results)

    def _batches(self, source: Any) -> tuple[Any, Iterator[Any]]:
        """The iterator of a source, None without one, and its batches as long as a rank has data.

        Keras 3 reads for `predict` by itself: a list of marked batches (keras_3_inputs.EqualAdapter), or one of
        predict_on_batch.
        """
        if isinstance(source, list):
            return None, self._marked(source)
        iterator = iterator_of(source)
        return iterator, self._data_of(iterator)

    def _data_of(self, iterator: Any) -> Iterator[Any]:
        while (read := self._read(iterator)).goes_on:
            yield read.data

    def _marked(self, batches: list[Any]) -> Iterator[Any]:
        for *mark, batch in batches:
            has_data = tf.cast(mark[0] if mark else True, tf.int32)
            if not collectives.all_reduce_sum(has_data, name=self._name) > 0:
                return
            yield batch

    def _of_last_form(self, predictions: Any, iterator: Any, samples: int) -> Any:
        """The predictions for a batch; without samples, in the form of the batch before.

        Sizes that the data set does not state are 0 in a batch of no samples, and Keras would put predictions of
        different sizes together as a RaggedTensor.
        """
        if samples:
            self._empty = (iterator, tf.nest.map_structure(_first_none, predictions))
            return predictions
        return self._empty[1] if self._empty[0] is iterator else predictions

    def _wrap(self, function: Callable, **options: Any) -> Callable:
        return tf.function(unconverted(function), **options) if self._compiled else function


def last(logs: list[Any]) -> Any:
    """The logs of the last step, which cover all steps since the epoch began."""
    return logs[-1]


def concatenated(predictions: list[Any]) -> Any:
    """Predictions of several steps, concatenated; scalars are stacked, as in Keras' predict."""

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(parts, 0) if parts[0].shape.rank else tf.stack(parts)

    return tf.nest.map_structure(join, *predictions)


def averaged(logs: Any) -> Any:
    """Logs of a user's own step: every number becomes its mean over ranks. Collective, eager."""
    if not isinstance(logs, dict):
        return logs
    names = [name for name in sorted(logs) if np.ndim(logs[name]) == 0]
    values = tf.constant([float(logs[name]) for name in names], tf.float64)
    total = collectives.all_reduce_sum(values, name="fusedrec.logs").numpy() if names else []
    return {**logs, **{name: float(value) / collectives.size() for name, value in zip(names, total)}}


def _first_none(predictions: Any) -> Any:
    """The first 0 samples of predictions; a scalar, which belongs to no sample, as it is."""
    if isinstance(predictions, tf.SparseTensor):
        return tf.sparse.slice(predictions, [0] * predictions.shape.rank, [0, *predictions.shape[1:]])
    return predictions[:0] if predictions.shape.rank else predictions


def _of_any_size(spec: Any) -> Any:
    """The spec of the same tensor for any number of samples."""
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def check_alike(kinds: Sequence[str], steps: Sequence[int | None]) -> None:
    """Raises ValueError unless all ranks have inputs of one kind and equal steps_per_epoch."""
    if len(set(steps)) > 1:
        raise ValueError(
            f"steps_per_epoch must be the same on all ranks, got {steps} by rank (steps in evaluate and predict, "
            "validation_steps for validation data)."
        )
    if len(set(kinds)) > 1:
        raise ValueError(
            f"ranks have inputs of different kinds: {kinds} by rank. Use the same kind on every rank, for example a "
            "tf.data.Dataset, which may be empty."
        )
