"""Ranks whose data end at different steps end together: TFRA has no guard, and the rank that goes on dies or waits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_fusedrec._tf_compat import keras, tf
from tf_fusedrec.exchange import collectives


def even(dataset: tf.data.Dataset, *, name: str = "even") -> tf.data.Dataset:
    """`dataset` until it has ended on any rank: all ranks get as many batches as the one that has fewest.

    Ranks ask one another before every batch, by one small all-reduce, so all must read it in step. Put it last,
    behind prefetch and shuffle.

    Args:
      dataset: of any elements; of unknown or infinite length, if it likes.
      name: of the all-reduce; data sets that are read at the same time need different ones.

    Returns:
      The same elements. Its length is not known before it has ended.
    """
    if collectives.size() == 1:
        return dataset
    optional = tf.experimental.Optional
    end = tf.data.Dataset.from_tensors(0).map(lambda _: optional.empty(dataset.element_spec))

    def all_have_one(element: tf.experimental.Optional) -> tf.Tensor:
        have = tf.cast(element.has_value(), tf.int32)
        return tf.equal(collectives.all_reduce_sum(have, name=f"fusedrec.{name}"), collectives.size())

    # map gives the parts of a tuple one by one.
    whole = isinstance(dataset.element_spec, tuple)
    batches = dataset.map(lambda *parts: optional.from_value(parts if whole else parts[0])).concatenate(end)
    # Nothing may read ahead: a rank would ask for a batch that the others, whose epoch is over, never ask for.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    told = batches.take_while(all_have_one).map(lambda element: element.get_value())
    return told.with_options(options)


def fit_evenly(model: keras.Model) -> None:
    """Makes fit, evaluate and predict of a model read data sets through `even`, and check arrays.

    Raises (when these are called):
      ValueError: arrays that make different numbers of batches on the ranks.
    """
    for method in ("fit", "evaluate", "predict"):
        setattr(model, method, _evenly(getattr(model, method), method))


def _evenly(original: Any, method: str) -> Any:
    def run(x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tf.data.Dataset):
            x = even(x, name=method)
        elif collectives.size() > 1 and not any(kwargs.get(steps) for steps in ("steps", "steps_per_epoch")):
            _check_arrays(x, kwargs.get("batch_size") or 32, method)
        return original(x, *args, **kwargs)

    return run


def _check_arrays(x: Any, batch_size: int, method: str) -> None:
    leaves = tf.nest.flatten(x)
    if not leaves or not all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves):
        return
    batches = [int(n) for n in collectives.all_gather(np.array([-(-len(leaves[0]) // batch_size)]))]
    if len(set(batches)) > 1:
        raise ValueError(
            f"{method} got arrays of {batches} batches on the ranks; those that go on would wait for those that have "
            "ended. Give it a tf.data.Dataset, which then ends with the shortest, or the same steps_per_epoch."
        )
