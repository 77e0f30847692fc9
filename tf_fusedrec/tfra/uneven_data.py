"""Stops all ranks at the same step when their data differ in length.

TFRA has no such guard: a rank with more batches dies or waits forever.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives


def stop_at_shortest(dataset: tf.data.Dataset, *, name: str = "stop_at_shortest") -> tf.data.Dataset:
    """Ends `dataset` on all ranks as soon as it ends on one: every rank gets the smallest number of batches.

    One small all-reduce precedes every batch, so all ranks must read the data set in step. Apply it last, after
    prefetch and shuffle.

    Args:
      dataset: Data set with elements of any structure. Its length may be unknown or infinite.
      name: Name of the all-reduce. Data sets that are read at the same time need different names.

    Returns:
      A data set of the same elements, with unknown cardinality.
    """
    if collectives.size() == 1:
        return dataset
    optional = tf.experimental.Optional
    end = tf.data.Dataset.from_tensors(0).map(lambda _: optional.empty(dataset.element_spec))

    def all_have_one(element: tf.experimental.Optional) -> tf.Tensor:
        have = tf.cast(element.has_value(), tf.int32)
        return tf.equal(collectives.all_reduce_sum(have, name=f"fusedrec.{name}"), collectives.size())

    # Dataset.map passes the components of a tuple as separate arguments.
    is_tuple = isinstance(dataset.element_spec, tuple)
    batches = dataset.map(lambda *parts: optional.from_value(parts if is_tuple else parts[0])).concatenate(end)
    # No stage may prefetch: it would wait in an all-reduce that ranks never join after their epoch.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    common = batches.take_while(all_have_one).map(lambda element: element.get_value())
    return common.with_options(options)


def stop_fit_at_shortest(model: keras.Model) -> None:
    """Wraps a model's fit, evaluate and predict: data sets end at the shortest one, arrays are checked."""
    for method in ("fit", "evaluate", "predict"):
        setattr(model, method, _stopped_at_shortest(getattr(model, method), method))


def _stopped_at_shortest(original: Any, method: str) -> Any:
    def run(x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tf.data.Dataset):
            x = _up_to_shortest(x, method)
        elif collectives.size() > 1 and not any(kwargs.get(steps) for steps in ("steps", "steps_per_epoch")):
            _check_arrays(x, kwargs.get("batch_size") or 32, method)
        return original(x, *args, **kwargs)

    return run


def _up_to_shortest(dataset: tf.data.Dataset, method: str) -> tf.data.Dataset:
    """Ends a data set with the shortest rank's, and keeps a known length. Collective.

    Keras ends an epoch of unknown length by a step that fails without data, but counts in optimizer.iterations. Adam
    would then train otherwise than before fuse().
    """
    lengths = collectives.all_gather(np.array([int(dataset.cardinality())]))
    if (lengths == tf.data.UNKNOWN_CARDINALITY).any():
        return stop_at_shortest(dataset, name=method)
    finite = lengths[lengths != tf.data.INFINITE_CARDINALITY]
    return dataset if len(finite) == 0 else dataset.take(finite.min())


def _check_arrays(x: Any, batch_size: int, method: str) -> None:
    leaves = tf.nest.flatten(x)
    if not leaves or not all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves):
        return
    batches = [int(n) for n in collectives.all_gather(np.array([-(-len(leaves[0]) // batch_size)]))]
    if len(set(batches)) > 1:
        raise ValueError(
            f"{method} got arrays of {batches} batches on the ranks; all ranks must have equally many. Pass a "
            "tf.data.Dataset, which stops with the shortest rank, or the same steps_per_epoch on all ranks."
        )
