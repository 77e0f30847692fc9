"""Lookup, forward and backward pass of each variant's step (MTGRBoost, section 6, figure 12)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

import tf_fusedrec as fr
from benchmarks.train_step.variants import Variant
from tf_fusedrec import tf

PHASES = ("lookup", "forward", "backward")
Tensors = tuple[dict[str, tf.Tensor], tf.Tensor]


def phases_ms(variants: Sequence[Variant], batches: Iterable[Tensors], warmup: int) -> dict[str, dict[str, float]]:
    """Returns milliseconds by variant and phase, medians over batches of the slowest rank.

    Graphs of the lookup, of the lookup with the dense layers, and of the whole step take turns on every batch. "lookup"
    is the time of the first, with the exchange. "forward" is the time that the second takes longer. "backward" is the
    time that the third takes longer still, with the exchange of gradients and the updates.

    Args:
      variants: The variants.
      batches: Features and labels, new to all variants.
      warmup: Batches that are not measured.
    """
    calls: list[Callable] = []
    for variant in variants:
        calls += [_function(variant.pooled), _function(variant.loss), variant.step]
    runs = []
    for number, (ids, labels) in enumerate(batches):
        seconds = np.zeros(len(calls))
        for turn in range(len(calls)):
            place = (number + turn) % len(calls)
            arguments = (ids,) if place % len(PHASES) == 0 else (ids, labels)
            fr.collectives.barrier()
            begin = time.perf_counter()
            calls[place](*arguments)
            seconds[place] = time.perf_counter() - begin
        if number >= warmup:
            runs.append(seconds)
    slowest = fr.collectives.all_gather(np.array(runs)[np.newaxis]).max(axis=0)
    medians = 1e3 * np.median(slowest, axis=0).reshape(len(variants), len(PHASES))
    steps = np.diff(medians, axis=1, prepend=0.0)
    return {variant.name: dict(zip(PHASES, map(float, row))) for variant, row in zip(variants, steps)}


def _function(python: Callable) -> Callable:
    return tf.function(tf.autograph.experimental.do_not_convert(python), autograph=False)
