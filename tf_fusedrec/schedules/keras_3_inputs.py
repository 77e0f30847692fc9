"""Keras 3 iterates over inputs of fit, evaluate and predict equally often on all ranks.

Keras takes an adapter in place of an input, and asks it for a data set and a number of batches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.data.batches import no_samples
from tf_fusedrec.exchange import collectives
from tf_fusedrec.schedules.feed import check_alike

Arguments = tuple[tuple, dict[str, Any]]  # positional and named
_adapters: Any = keras.src.trainers.data_adapters


@contextlib.contextmanager
def equal_lengths(model: keras.Model, verb: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """Inside, Keras iterates over each input of `model` equally often on all ranks. As in legacy_inputs.py."""
    if collectives.size() == 1 or "_use_cached_eval_dataset" in kwargs:  # fit has equal validation data
        yield args, kwargs
        return
    bound = inspect.signature(getattr(keras.Model, verb)).bind(model, *args, **kwargs)
    if bound.arguments.get("kwargs"):
        raise TypeError(f"{verb} got unknown arguments {sorted(bound.arguments['kwargs'])}.")
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
    data = [arguments.pop(name, None) for name in ("x", "y", "sample_weight")]
    if arguments.get("validation_split") and arguments["validation_data"] is None:
        split = _adapters.array_data_adapter.array_slicing.train_validation_split
        data, arguments["validation_data"] = split(tuple(data), validation_split=arguments.pop("validation_split"))
    shuffle, class_weight = arguments.get("shuffle", False), arguments.pop("class_weight", None)
    steps = arguments.get("steps_per_epoch" if verb == "fit" else "steps")
    of_data = {"batch_size": arguments["batch_size"], "steps_per_epoch": steps}
    arguments["x"] = EqualAdapter(data, shuffle=shuffle, class_weight=class_weight, marked=verb == "predict", **of_data)
    if arguments.get("validation_data") is not None:
        validation = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        arguments["validation_data"] = EqualAdapter(
            validation,
            batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
            steps_per_epoch=arguments["validation_steps"],
        )
    yield (), arguments


class EqualAdapter(_adapters.data_adapter.DataAdapter):
    """Keras' adapter of an input, with the number of batches of the rank with the most. Collective.

    The number is None if one rank does not know its number. When the data of a rank has ended, Feed and EqualSteps give
    it batches of no samples.

    Args:
      data: x, y and sample_weight of fit.
      marked: True for `predict`, which reads batches itself: every batch becomes (whether it is of the data, batch),
        and batches of no samples follow the last one.
      options: Other arguments of Keras' adapters.

    Raises:
      ValueError: on all ranks, where the inputs of ranks differ in kind or in `steps_per_epoch`, or where a rank cannot
        read its input.
    """

    def __init__(self, data: Any, *, marked: bool = False, **options: Any):
        self._marked, error = marked, None
        report: tuple = ("", None, None)
        try:
            self._adapter = _adapters.get_data_adapter(*data, **options)
            name = type(self._adapter).__name__.removesuffix("Adapter")
            report = _NAMES.get(name, name), options["steps_per_epoch"], self._adapter.num_batches
        except Exception as of_this_rank:
            error = of_this_rank
        text = None if error is None else f"{type(error).__name__}: {error}"
        by_rank = collectives.all_gather_object((report, text))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(by_rank):
            if text is not None:
                raise ValueError(f"rank {rank} cannot read its input: {text}")
        kinds, steps, counts = map(list, zip(*(report for report, _ in by_rank)))
        check_alike(kinds, steps)
        self._num_batches = None if None in counts else max(counts)

    def get_tf_dataset(self) -> tf.data.Dataset:
        dataset = self._adapter.get_tf_dataset()
        if not self._marked:
            return dataset
        spec = dataset.element_spec
        nothing = tf.data.Dataset.from_tensors(0).map(lambda _: (False, no_samples(spec))).repeat()
        return dataset.map(lambda *batch: (True, batch if isinstance(spec, tuple) else batch[0])).concatenate(nothing)

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


_NAMES = {"ArrayData": "arrays", "TFDataset": "tf.data.Dataset", "PyDataset": "keras.utils.PyDataset",
          "GeneratorData": "generator"}  # fmt: skip
