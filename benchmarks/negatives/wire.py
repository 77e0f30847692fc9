"""Bytes of rows and gradients that a step sends, in float32 and in float16. benchmarks.negatives runs it on 2 ranks.

The bytes are counted at the call of the all-to-all. They include a rank's message to itself.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from tf_fusedrec import losses, tf
from tf_fusedrec.exchange import collectives

MARK = "WIRE "
RANKS = 2
POSITIONS, NEGATIVES, ITEMS, DIM = 256, 128, 20_000, 64


def bytes_of_a_step(output_dtype: str) -> dict[str, int]:
    """Returns the bytes of all ranks, by feature (`negative` or others) and by kind of message."""
    table = fr.TableConfig("item", DIM, optimizer=fr.optimizers.Adam(1e-3))
    features = [fr.FeatureConfig("item_id", "item"), fr.FeatureConfig("negative", "item", output_dtype=output_dtype)]
    layer = fr.FusedEmbedding([table], features, seed=1, name=f"wire_{output_dtype}")
    generator = np.random.default_rng(fr.collectives.rank())
    items = tf.constant(generator.integers(0, ITEMS, POSITIONS))
    drawn, chosen = np.unique(generator.integers(0, ITEMS, (POSITIONS, NEGATIVES)), return_inverse=True)
    drawn, chosen = tf.constant(drawn), tf.constant(chosen.reshape(POSITIONS, NEGATIVES), tf.int32)
    counts: dict[str, int] = {}
    honest = collectives.all_to_all

    def counted(tensor: tf.Tensor, splits: tf.Tensor, *, name: str, **ranks: Any) -> tuple[tf.Tensor, tf.Tensor]:
        feature, kind = ("negative" if "float16" in name else "others"), name.rpartition(".")[2]
        width = tensor.dtype.size * int(np.prod(tensor.shape[1:]))
        counts[f"{feature}_{kind}"] = counts.get(f"{feature}_{kind}", 0) + int(tf.reduce_sum(splits)) * width
        return honest(tensor, splits, name=name, **ranks)

    collectives.all_to_all = counted
    try:
        with tf.GradientTape() as tape:
            rows = layer({"item_id": items, "negative": drawn})
            own = rows["item_id"]
            nll = losses.sampled_softmax(own, own, rows["negative"], items, drawn, 0.05, chosen=chosen)
            loss = losses.global_mean(nll, name="wire.loss")
        tape.gradient(loss, layer.trainable_variables)
    finally:
        collectives.all_to_all = honest
    names = sorted(collectives.all_gather_object(sorted(counts))[0])
    total = collectives.all_gather(np.array([[counts[name] for name in names]])).sum(axis=0)
    return dict(zip(names, map(int, total)))


def main() -> None:
    fr.init()
    answers = {dtype: bytes_of_a_step(dtype) for dtype in ("float32", "float16")}
    if fr.collectives.rank() == 0:
        print(MARK + json.dumps(answers), flush=True)


if __name__ == "__main__":
    harness.run(main)
