"""The times of a real model's dense part on one core: a line through micro-batches of several sizes.

The dense part is the GRM of model.py, which reads its rows from a variable. The forward pass ends with the loss. The
backward pass ends with the gradients of weights and rows. The shortest of several passes counts, because other work of
the machine only adds time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import children
from benchmarks.overlap.model import LocalRows, Size, make_batch, make_model
from tf_fusedrec import tf

USERS = (1, 4, 16, 64)  # of the micro-batches; the smallest one shows the fixed time


def line(tokens: list[int], seconds: list[float]) -> tuple[float, float]:
    """Returns the fixed time and the time per token with the least relative errors (squares). Neither is negative.

    Absolute errors would fit the largest batch alone, and its noise would become the fixed time.
    """
    slope, fixed = np.polyfit(tokens, seconds, 1, w=1 / np.asarray(seconds))
    return max(float(fixed), 0.0), max(float(slope), 0.0)


def shortest_s(call: Callable[[], Any], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def passes(size: Size) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns the forward pass, and the forward with the backward pass, of a micro-batch of this size."""
    model = make_model(size, LocalRows(size), "sync", reduce=False)
    batch = make_batch(size, 0)

    def forward() -> tf.Tensor:
        return model.compute_loss(batch, None, model(batch, training=True), None)

    def both() -> Any:
        with tf.GradientTape() as tape:
            loss = forward()
        return tape.gradient(loss, model.trainable_variables)

    return tf.function(forward, autograph=False), tf.function(both, autograph=False)


def measured(size: Size, repeats: int) -> dict[str, Any]:
    """Returns the fields of device_model.Compute from `repeats` passes of each. The users of `size` are replaced."""
    tokens, forward, backward = [], [], []
    for users in USERS:
        of_size = dataclasses.replace(size, users=users)
        one, both = (shortest_s(call, repeats) for call in passes(of_size))
        tokens.append(of_size.tokens)
        forward.append(one)
        backward.append(both - one)
    (fixed_f, per_f), (fixed_b, per_b) = line(tokens, forward), line(tokens, backward)
    return {"fixed": (fixed_f, fixed_b), "per_token": (per_f, per_b)}


def main(size: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Returns `measured` on one core. `size` has the fields of model.Size."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return measured(Size(**size), repeats)


if __name__ == "__main__":
    children.answer(main)
