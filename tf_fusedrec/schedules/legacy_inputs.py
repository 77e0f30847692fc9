"""tf_keras iterates over inputs of fit, evaluate and predict equally often on all ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.data.batches import no_samples
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import check_alike

Arguments = tuple[tuple, dict[str, Any]]  # positional and named
_adapters: Any = keras.src.engine.data_adapter


@contextlib.contextmanager
def equal_lengths(model: keras.Model, verb: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """Inside, Keras iterates over each input of `model` equally often on all ranks.

    Inputs are those of fit, its validation data or split, evaluate and predict. Keras has no public way to replace the
    handler that it makes for an input.

    Args:
      model: The model.
      verb: The method that is called inside: "fit", "evaluate" or "predict".
      args, kwargs: Arguments of this method.

    Returns:
      The arguments with which to call it.
    """
    if collectives.size() == 1:
        yield args, kwargs
        return
    get_handler_of_keras = _adapters.get_data_handler

    def get_data_handler(*args: Any, **kwargs: Any) -> Any:
        return EqualHandler(**kwargs) if kwargs.get("model") is model else get_handler_of_keras(*args, **kwargs)

    _adapters.get_data_handler = get_data_handler
    try:
        yield args, kwargs
    finally:
        _adapters.get_data_handler = get_handler_of_keras


class EqualHandler(_adapters.DataHandler):
    """Keras' iteration over one input, for as many steps as the rank with the most batches makes. Collective.

    Keras stops a rank after its own number of batches. Here all ranks take the largest number, or None if one rank does
    not know its number. When the data of a rank has ended, Feed and EqualSteps give it batches of no samples.

    Raises ValueError on all ranks, where the inputs of ranks differ in kind or in `steps_per_epoch`, or where a rank
    cannot read its input.
    """

    _dataset: tf.data.Dataset

    def __init__(self, x: Any, y: Any = None, **kwargs: Any):
        self._others_wait = True  # for a message of this constructor
        try:
            x, name = _peeked(x, y, kwargs["model"])
            # Keras calls a model without weights on the first batch of some inputs, which is collective.
            self._agree((name, kwargs.get("steps_per_epoch")))
            super().__init__(x, y, **kwargs)
        except Exception as error:
            if self._others_wait:
                self._gather(None, f"{type(error).__name__}: {error}")
            raise

    def _configure_dataset_and_inferred_steps(self, strategy: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        super()._configure_dataset_and_inferred_steps(strategy, x, *args, **kwargs)
        dataset, adapter = self._dataset, self._adapter
        if self._steps_per_epoch is not None or adapter.get_size() is None:
            return
        if adapter.should_recreate_iterator():
            # Lists, and the workers of a Sequence of changing length, read on into the next epoch.
            self._dataset = tf.data.Dataset.from_tensors(0).flat_map(
                lambda _: dataset.take(tf.ensure_shape(tf.py_function(adapter.get_size, [], tf.int64), []))
            )
        else:
            # Keras repeats arrays inside one data set, which therefore has batches of no samples after each epoch.
            self._dataset = _filled_up(dataset, adapter.get_size(), self._inferred_steps)

    def _infer_steps(self, steps: int | None, dataset: tf.data.Dataset) -> int | None:
        batches = super()._infer_steps(steps, dataset)
        by_rank = self._gather((batches, self._adapter.should_recreate_iterator()))
        self._others_wait = False
        if not all(recreates for _, recreates in by_rank):
            # With steps_per_epoch, Keras recreates a data set's iterator each epoch if that is its number of batches.
            self._adapter.should_recreate_iterator = lambda: False
        counts = [batches for batches, _ in by_rank]
        return None if None in counts else max(counts)

    def _agree(self, kind_and_steps: tuple[str, int | None]) -> None:
        """Raises ValueError unless all ranks have inputs of one kind and equal steps_per_epoch."""
        kinds, steps = map(list, zip(*self._gather(kind_and_steps)))
        self._others_wait = len(set(kinds)) == len(set(steps)) == 1
        check_alike(kinds, steps)

    def _gather(self, value: Any, error: str | None = None) -> list[Any]:
        """The values of all ranks. Raises ValueError if another rank has an error in place of its value."""
        by_rank = collectives.all_gather_object((value, error))
        for rank, (_, error_there) in enumerate(by_rank):
            if error_there is not None and error is None:
                self._others_wait = False
                raise ValueError(f"rank {rank} cannot read its input: {error_there}")
        return [value for value, _ in by_rank]


def _peeked(x: Any, y: Any, model: keras.Model) -> tuple[Any, str]:
    """The input, unchanged for its reader, and its name. Raises ValueError if it is empty and Keras reads ahead."""
    adapter = _adapters.select_data_adapter(x, y).__name__
    name = {"TensorLikeDataAdapter": "arrays", "ListsOfScalarsDataAdapter": "lists"}.get(adapter, type(x).__name__)
    has_first = True
    if adapter == "KerasSequenceAdapter":
        has_first = len(x) > 0
        if has_first and not model.built:
            x[0]  # an error is raised before the model is called, and reaches all ranks
        name = "keras.utils.Sequence"
    elif adapter == "GeneratorDataAdapter":
        nothing = object()
        first = next(x, nothing)
        has_first, x = first is not nothing, itertools.chain([first], x)
        name = "generator"
    elif adapter == "DatasetAdapter":
        name = "tf.data.Dataset"
    if not has_first:
        raise ValueError(f"the {name} is empty. Use a tf.data.Dataset, which may be empty on a rank.")
    return x, name


def _filled_up(dataset: tf.data.Dataset, batches: int, steps: int | None) -> tf.data.Dataset:
    """The data set, with batches of no samples after each `batches` of its batches, up to `steps`."""
    if batches == steps or steps is None:
        return dataset
    nothing = tf.data.Dataset.from_tensors(0).map(lambda _: no_samples(dataset.element_spec)).repeat()
    turns = tf.data.Dataset.range(steps).map(lambda i: tf.cast(i >= batches, tf.int64)).repeat()
    return tf.data.Dataset.choose_from_datasets([dataset, nothing], turns)
