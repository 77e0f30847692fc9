"""All ranks of one `fit`, `evaluate` or `predict` make equally many steps, however many batches each rank has."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import no_samples

_adapters: Any = keras.src.engine.data_adapter


@contextlib.contextmanager
def equal_lengths(model: keras.Model) -> Iterator[None]:
    """Inside, Keras iterates over the inputs of `model` equally often on all ranks, whatever kind of input it gets.

    Keras makes one handler for each input: of fit, of its validation data or split, of evaluate and predict. It has no
    public way to give it another one.
    """
    if collectives.size() == 1:
        yield
        return
    before = _adapters.get_data_handler

    def get_data_handler(*args: Any, **kwargs: Any) -> Any:
        return EqualHandler(**kwargs) if kwargs.get("model") is model else before(*args, **kwargs)

    _adapters.get_data_handler = get_data_handler
    try:
        yield
    finally:
        _adapters.get_data_handler = before


class EqualHandler(_adapters.DataHandler):
    """Keras' iteration over one input, for as many steps as the rank with the most batches makes. Collective.

    Keras stops a rank after its own number of batches. Here all ranks take the largest number, or None if one rank does
    not know its number. When the data of a rank has ended, Feed and EqualSteps give it batches of no samples.

    Args:
      x, y, kwargs: Arguments of Keras' DataHandler, which are those of fit.

    Raises:
      ValueError: on all ranks, where the inputs of ranks differ in kind or in `steps_per_epoch`, or where a rank cannot
        read its input.
    """

    _dataset: tf.data.Dataset

    def __init__(self, x: Any, y: Any = None, **kwargs: Any):
        self._told = False  # whether the other ranks wait for nothing more from this constructor
        try:
            x, kind = _peeked(x, y, kwargs["model"])
            # Keras calls a model without weights on the first batch of some inputs, which is collective.
            self._agree((kind, kwargs.get("steps_per_epoch")))
            super().__init__(x, y, **kwargs)
        except Exception as error:
            if not self._told:
                self._gather(None, f"{type(error).__name__}: {error}")
            raise

    def _configure_dataset_and_inferred_steps(self, strategy: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        super()._configure_dataset_and_inferred_steps(strategy, x, *args, **kwargs)
        whole, adapter = self._dataset, self._adapter
        if self._steps_per_epoch is not None or adapter.get_size() is None:
            return
        if adapter.should_recreate_iterator():
            # Lists and the workers of a Sequence, whose length may change, read on into the next epoch.
            self._dataset = tf.data.Dataset.from_tensors(0).flat_map(
                lambda _: whole.take(tf.ensure_shape(tf.py_function(adapter.get_size, [], tf.int64), []))
            )
        else:
            # Keras repeats arrays inside one data set, which therefore has batches of no samples after each epoch.
            self._dataset = _filled_up(whole, adapter.get_size(), self._inferred_steps)

    def _infer_steps(self, steps: int | None, dataset: tf.data.Dataset) -> int | None:
        batches = super()._infer_steps(steps, dataset)
        recreates = self._adapter.should_recreate_iterator()
        of_ranks = self._gather((batches, recreates))
        self._told = True
        if not all(recreates for _, recreates in of_ranks):
            # With steps_per_epoch, Keras begins a data set anew in each epoch if it has just so many batches.
            self._adapter.should_recreate_iterator = lambda: False
        counts = [batches for batches, _ in of_ranks]
        return None if None in counts else max(counts)

    def _agree(self, kind_and_steps: tuple[str, int | None]) -> None:
        """Raises ValueError unless all ranks have inputs of one kind and equal steps_per_epoch."""
        of_ranks = self._gather(kind_and_steps)
        kinds, steps = [kind for kind, _ in of_ranks], [steps for _, steps in of_ranks]
        self._told = len(set(kinds)) > 1 or len(set(steps)) > 1
        if len(set(steps)) > 1:
            raise ValueError(
                f"steps_per_epoch must be the same on all ranks, got {steps} by rank (steps in evaluate and predict, "
                "validation_steps for validation data)."
            )
        if len(set(kinds)) > 1:
            raise ValueError(
                f"ranks have inputs of different kinds: {kinds} by rank. Remedy: the same kind on every rank, for "
                "example a tf.data.Dataset, which may be empty."
            )

    def _gather(self, mine: Any, error: str | None = None) -> list[Any]:
        """The values of all ranks. Raises ValueError if another rank comes with an error in place of its value."""
        of_ranks = collectives.all_gather_object((mine, error))
        for rank, (_, failed) in enumerate(of_ranks):
            if failed is not None and error is None:
                self._told = True
                raise ValueError(f"rank {rank} cannot read its input: {failed}")
        return [value for value, _ in of_ranks]


def _peeked(x: Any, y: Any, model: keras.Model) -> tuple[Any, str]:
    """The input, unchanged for its reader, and the name of its kind.

    Raises:
      ValueError: Keras looks at the first batch of such an input, and there is none.
    """
    kind = _adapters.select_data_adapter(x, y).__name__
    name = {"TensorLikeDataAdapter": "arrays", "ListsOfScalarsDataAdapter": "lists"}.get(kind, type(x).__name__)
    has_first = True
    if kind == "KerasSequenceAdapter":
        has_first = len(x) > 0
        if has_first and not model.built:
            x[0]  # an error comes before the model is called, and reaches all ranks
        name = "keras.utils.Sequence"
    elif kind == "GeneratorDataAdapter":
        nothing = object()
        first = next(x, nothing)
        has_first, x = first is not nothing, itertools.chain([first], x)
        name = "generator"
    elif kind == "DatasetAdapter":
        name = "tf.data.Dataset"
    if not has_first:
        raise ValueError(f"the {name} is empty. Remedy: a tf.data.Dataset, which may be empty on a rank.")
    return x, name


def _filled_up(dataset: tf.data.Dataset, batches: int, steps: int | None) -> tf.data.Dataset:
    """The data set, with batches of no samples after each `batches` of its batches, up to `steps`."""
    if batches == steps or steps is None:
        return dataset
    nothing = tf.data.Dataset.from_tensors(0).map(lambda _: no_samples(dataset.element_spec)).repeat()
    turns = tf.data.Dataset.range(steps).map(lambda i: tf.cast(i >= batches, tf.int64)).repeat()
    return tf.data.Dataset.choose_from_datasets([dataset, nothing], turns)
