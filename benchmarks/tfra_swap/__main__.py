"""Question: what does a TFRA program gain when its layers become ours and `fuse(model)` joins their exchanges?

    python -m benchmarks.tfra_swap [--quick] [--json FILE]

On two ranks, a Keras model of 26 HvdAllToAllEmbedding layers is built with TFRA's class and with ours. Both keep TFRA's
optimizer, its rule over ranks and its tables. A check comes first: the losses of both must agree at every step. Then
the two models take turns on new batches. `tfra_as_launched` is TFRA as before the swap, without the policy of fr.init.

Fields:
  ratio, ratio_as_launched        median step of TFRA, and of tfra_as_launched, over ours
  max_loss_difference             over the checked steps and ranks
  alltoalls_tfra, alltoalls_ours  per step and rank, counted in the traced graphs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.ranks import AS_LAUNCHED
from benchmarks.harness.synthetic import Batches
from tf_fusedrec import keras, tf
from tf_fusedrec.tfra import fuse
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.tfra_library import de

RANKS = 2
FEATURES, BATCH_SIZE, IDS_PER_FEATURE, ZIPF_ALPHA, DIM = 26, 512, 4, 1.05, 16
ROWS_PER_LAYER = 1 << 16  # allocated at once by both, so that no table grows during the measurement


class Clicks(keras.Model):
    """A click model on the mean row of every feature, written as for TFRA except for the class of its layers."""

    def __init__(self, layer_class: Callable[..., keras.layers.Layer], features: Sequence[str], name: str):
        super().__init__(name=name)
        self.embeddings = [
            layer_class(
                embedding_size=DIM, initializer=keras.initializers.Constant(0.05), devices=["/CPU:0"],
                init_capacity=ROWS_PER_LAYER, name=f"{name}_{feature}",
            )
            for feature in features
        ]  # fmt: skip
        self.tower = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
        self.tower.build((None, len(features) * DIM))
        random = np.random.default_rng(0)
        self.tower.set_weights([random.normal(0, 0.1, w.shape).astype(np.float32) for w in self.tower.get_weights()])

    def call(self, ids: Sequence[tf.Tensor]) -> tf.Tensor:
        rows = [tf.reduce_mean(layer(part), axis=1) for layer, part in zip(self.embeddings, ids)]
        return self.tower(tf.concat(rows, axis=1))[:, 0]


def training_step(model: keras.Model) -> tf.types.experimental.GenericFunction:
    """Returns step(ids <int64>[F, B, L], labels <float32>[B]) -> loss, with TFRA's optimizer in synchronous mode."""
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adagrad(0.05), synchronous=True)

    @tf.function(reduce_retracing=True)
    @tf.autograph.experimental.do_not_convert
    def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, model(tf.unstack(ids))))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return step


def variants(features: Sequence[str]) -> dict[str, Any]:
    """Returns the training steps by name."""
    tfra = Clicks(de.keras.layers.HvdAllToAllEmbedding, features, "tfra")
    ours = Clicks(FusedTfraEmbedding, features, "ours")
    fuse(ours)
    return {"tfra": training_step(tfra), "ours": training_step(ours)}


def measure(steps: dict[str, Any], batches: Batches, warmup: int, repeats: int) -> dict[str, Any]:
    """Returns the fields."""

    def batch(number: int) -> tuple[tf.Tensor, ...]:
        return tuple(map(tf.constant, batches.batch(number, fr.rank())))

    fields = ranks.compare_steps(steps, batch, warmup=warmup, repeats=repeats)
    all_to_alls = {f"alltoalls_{name}": count for name, count in fields.pop("alltoalls_per_step").items()}
    ratios = {"ratio": fields["ratio_vs_tfra"], "ratio_as_launched": fields[f"ratio_vs_{AS_LAUNCHED}"]}
    return {**ratios, **fields, **all_to_alls}


def on_rank(quick: bool) -> dict[str, Any]:
    fr.init()
    tf.get_logger().setLevel("ERROR")  # TFRA warns once per layer about savers, which this run does not use
    batches = Batches(features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA)
    fields = measure(variants([f"f{f:02d}" for f in range(FEATURES)]), batches, 10, 60 if quick else 300)
    return fields


def main() -> None:
    arguments = harness.parser(__doc__).parse_args()
    fields = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    setting = {
        "ranks": RANKS, "layers": FEATURES, "batch_size": BATCH_SIZE, "ids_per_layer": IDS_PER_FEATURE, "dim": DIM,
    }  # fmt: skip
    harness.print_fields(f"tfra_swap: {setting}", fields)
    harness.write_json(arguments.json, {**fields, "setting": setting})


if __name__ == "__main__":
    processes.program(main)
