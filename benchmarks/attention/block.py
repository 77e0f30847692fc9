"""One HSTU block, both passes: gate and norm in the attention's op, or in TensorFlow's ops behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attention import batch
from benchmarks.harness import harness
from tf_fusedrec import keras, layers, tf


def _passes(layer: layers.HSTU, x: tf.RaggedTensor, grads: tf.Tensor) -> Callable[[], Any]:
    def both():
        with tf.GradientTape() as tape:
            tape.watch(x.values)
            out = layer(x).values
        return out, *tape.gradient(out, [x.values, *layer.trainable_variables], grads)

    return tf.function(both)


def block(rows: int, repeats: int) -> dict[str, float]:
    """Returns the times of the block of the research form, with HEADS heads of DIM columns, and their ratio."""
    lengths, random = batch.long_tailed(rows), np.random.default_rng(2)
    tokens, grads = (random.normal(size=[lengths.sum(), batch.HEADS * batch.DIM]).astype(np.float32) for _ in range(2))
    x = tf.RaggedTensor.from_row_lengths(tokens, lengths)
    calls = {}
    for name in ("fused", "outside"):
        keras.utils.set_random_seed(1)
        heads, dim, longest = batch.HEADS, batch.DIM, batch.LONGEST
        layer = layers.HSTU(heads, dim, dim, max_sequence_length=longest, position_bias=False, time_encoding="none")
        layer.build(x.shape)
        if name == "outside":
            layer.kernels = layer.kernels._replace(gated_attention=None)
        calls[name] = _passes(layer, x, tf.constant(grads))
    for number, (ours, theirs) in enumerate(zip(calls["fused"](), calls["outside"]())):
        reason = "float32 sums of another order"
        harness.check_close(f"result {number} of the block", ours, theirs.numpy(), relative=1e-4, reason=reason)
    times = {name: timing.median_s for name, timing in harness.measure(calls, warmup=1, repeats=repeats).items()}
    return {
        "block_fused_ratio": times["outside"] / times["fused"],
        **{f"ms_block_{name}": 1e3 * seconds for name, seconds in times.items()},
    }
