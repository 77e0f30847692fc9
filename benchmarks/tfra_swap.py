"""The swap: a Keras model of 26 HvdAllToAllEmbedding layers, with TFRA, and with FusedTfraEmbedding and fuse(model).

    python -m benchmarks.tfra_swap [--quick] [--json FILE]

Question: what does a TFRA program gain by the swap? One model, built once with each class; TFRA's optimizer, its rule
over ranks, its tables. First the losses of both must agree step by step, then they take turns on new batches.

Fields: ratio (median step of TFRA over ours), max_loss_difference (over the checked steps and ranks), alltoalls_tfra
and alltoalls_ours (per step and rank, counted in the traced graphs).
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks import harness
from benchmarks.graph_count import count_nodes
from benchmarks.synthetic import Batches
from tf_fusedrec import keras, tf
from tf_fusedrec.tables.tfra import de
from tf_fusedrec.tfra import FusedTfraEmbedding, fuse

RANKS = 2
FEATURES = 26
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
ZIPF_ALPHA = 1.05
DIM = 16
LEARNING_RATE = 0.05
CHECKED_STEPS = 12
ROWS_PER_LAYER = 1 << 16  # memory taken at once, alike for both, so that no table grows while it is measured
LOSS_TOLERANCE = 1e-5  # float32 sums in another order differ by 1e-7 of their size; a dozen steps amplify that


class Clicks(keras.Model):
    """Mean row of every feature, two dense layers. A program of TFRA's, but for the class of its layers."""

    def __init__(self, layer_class: Callable[..., keras.layers.Layer], features: Sequence[str], name: str):
        super().__init__(name=name)
        self.embeddings = [
            layer_class(
                embedding_size=DIM,
                initializer=keras.initializers.Constant(0.05),
                devices=["/CPU:0"],
                init_capacity=ROWS_PER_LAYER,
                name=f"{name}_{feature}",
            )
            for feature in features
        ]
        self.tower = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
        self.tower.build((None, len(features) * DIM))
        random = np.random.default_rng(0)
        self.tower.set_weights([random.normal(0, 0.1, w.shape).astype(np.float32) for w in self.tower.get_weights()])

    def call(self, ids: Sequence[tf.Tensor]) -> tf.Tensor:
        rows = [tf.reduce_mean(layer(part), axis=1) for layer, part in zip(self.embeddings, ids)]
        return self.tower(tf.concat(rows, axis=1))[:, 0]


def training_step(model: keras.Model) -> tf.types.experimental.GenericFunction:
    """step(ids <int64>[F, B, L], labels <float32>[B]) -> loss, by TFRA's optimizer in its synchronous mode."""
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adagrad(LEARNING_RATE), synchronous=True)

    @tf.function(reduce_retracing=True)
    @tf.autograph.experimental.do_not_convert
    def step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(tf.unstack(ids))
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return step


def contenders(features: Sequence[str]) -> dict[str, Any]:
    """The training steps by name."""
    tfra = Clicks(de.keras.layers.HvdAllToAllEmbedding, features, "tfra")
    ours = Clicks(FusedTfraEmbedding, features, "ours")
    fuse(ours)
    return {"tfra": training_step(tfra), "ours": training_step(ours)}


def largest_difference(steps: dict[str, Any], batches: Batches) -> float:
    """Trains CHECKED_STEPS steps of each; the largest difference between their losses over steps and ranks.

    Raises:
      CheckFailed: it is above LOSS_TOLERANCE, or the losses do not move.
    """
    losses = {
        name: [float(step(*map(tf.constant, batches.batch(s, fr.collectives.rank())))) for s in range(CHECKED_STEPS)]
        for name, step in steps.items()
    }
    harness.check_close(
        "losses of ours by step against TFRA's", losses["ours"], losses["tfra"], relative=LOSS_TOLERANCE,
        reason="float32 sums in another order, amplified by training",
    )  # fmt: skip
    if np.ptp(losses["tfra"]) < 100 * LOSS_TOLERANCE:
        raise harness.CheckFailed(f"TFRA's losses do not move, so they compare nothing: {losses['tfra']}.")
    mine = np.abs(np.subtract(losses["ours"], losses["tfra"])).max()
    return float(fr.collectives.all_gather(np.array([mine])).max())


def measure(steps: dict[str, Any], batches: Batches, *, warmup: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step; they take turns, and the slowest rank decides how long one takes."""
    names = list(steps)
    seconds = np.zeros([len(names), repeats])
    for repeat in range(-warmup, repeats):
        batch = list(map(tf.constant, batches.batch(CHECKED_STEPS + warmup + repeat, fr.collectives.rank())))
        for turn in range(len(names)):
            n = (repeat + turn) % len(names)
            fr.collectives.barrier()
            begin = time.perf_counter()
            steps[names[n]](*batch)
            if repeat >= 0:
                seconds[n, repeat] = time.perf_counter() - begin
    slowest = fr.collectives.all_gather(seconds[np.newaxis]).max(axis=0)
    return dict(zip(names, slowest.tolist()))


def main() -> None:
    arguments = harness.parse_arguments("A step of 26 TFRA layers, and of the same after the swap, on 2 processes.")
    harness.on_ranks("benchmarks.tfra_swap", RANKS)
    fr.init()
    tf.get_logger().setLevel("ERROR")  # TFRA warns once per layer about savers, which this run does not use
    batches = Batches(
        features=FEATURES, batch_size=BATCH_SIZE, ids_per_feature=IDS_PER_FEATURE, alpha=ZIPF_ALPHA
    )  # fmt: skip
    steps = contenders([f"f{f:02d}" for f in range(FEATURES)])
    fields: dict[str, Any] = {"ratio": None, "max_loss_difference": largest_difference(steps, batches)}
    example = list(map(tf.constant, batches.batch(0, 0)))
    for name, step in steps.items():
        graph = step.get_concrete_function(*example).graph.as_graph_def()
        fields[f"alltoalls_{name}"] = count_nodes(graph, "HorovodAlltoall")
    seconds = measure(steps, batches, warmup=10, repeats=60 if arguments.quick else 300)
    timings = {name: harness.timing(values) for name, values in seconds.items()}
    fields["ratio"] = timings["tfra"].median_s / timings["ours"].median_s
    for name, timing in timings.items():
        fields |= {f"ms_{name}": 1e3 * timing.median_s, f"ms_p90_{name}": 1e3 * timing.p90_s}
    if fr.collectives.rank() > 0:
        return
    setting = {
        "ranks": RANKS, "layers": FEATURES, "batch_size": BATCH_SIZE, "ids_per_layer": IDS_PER_FEATURE, "dim": DIM,
    }  # fmt: skip
    rows = [
        {"": name, "ms": fields[f"ms_{name}"], "p90": fields[f"ms_p90_{name}"], "all2alls": fields[f"alltoalls_{name}"]}
        for name in timings
    ]
    harness.print_table(f"tfra_swap: {setting}", rows)
    print(f"  ratio {fields['ratio']:.2f}, losses differ by {fields['max_loss_difference']:.1e} at most")
    harness.write_json(arguments.json, {**fields, "setting": setting})


if __name__ == "__main__":
    harness.run(main)
