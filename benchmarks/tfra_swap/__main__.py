"""Question: what does a TFRA program gain when its layers become ours and `fuse(model)` joins their exchanges?

    python -m benchmarks.tfra_swap [--quick] [--json FILE]

The command starts two processes. A Keras model of 26 HvdAllToAllEmbedding layers is built with TFRA's class and with
ours. Both keep TFRA's optimizer, its rule over ranks and its tables. A check comes first: the losses of both must agree
at every step. Then the two models take turns on new batches.

`fr.init` also keeps Gloo's loop from taking cores from computing threads. `tfra_as_launched` is TFRA without this
policy, as before the swap.

Fields:
  ratio                           median step of TFRA over ours
  ratio_as_launched               the same for tfra_as_launched
  max_loss_difference             over the checked steps and ranks
  alltoalls_tfra, alltoalls_ours  per step and rank, counted in the traced graphs
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.graph_count import count_nodes
from benchmarks.harness.synthetic import Batches
from tf_fusedrec import keras, tf
from tf_fusedrec.exchange import horovod_threads
from tf_fusedrec.tables.tfra_library import de
from tf_fusedrec.tfra import FusedTfraEmbedding, fuse

RANKS = 2
FEATURES = 26
BATCH_SIZE = 512
IDS_PER_FEATURE = 4
ZIPF_ALPHA = 1.05
DIM = 16
LEARNING_RATE = 0.05
CHECKED_STEPS = 12
ROWS_PER_LAYER = 1 << 16  # allocated at once by both, so that no table grows during the measurement
AS_LAUNCHED = "tfra_as_launched"
LOSS_TOLERANCE = 1e-5  # float32 sums in another order differ by 1e-7, and a dozen steps amplify that


class Clicks(keras.Model):
    """A click model on the mean row of every feature, written as for TFRA except for the class of its layers."""

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
    """Returns step(ids <int64>[F, B, L], labels <float32>[B]) -> loss, with TFRA's optimizer in synchronous mode."""
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


def variants(features: Sequence[str]) -> dict[str, Any]:
    """Returns the training steps by name."""
    tfra = Clicks(de.keras.layers.HvdAllToAllEmbedding, features, "tfra")
    ours = Clicks(FusedTfraEmbedding, features, "ours")
    fuse(ours)
    return {"tfra": training_step(tfra), "ours": training_step(ours)}


def largest_difference(steps: dict[str, Any], batches: Batches) -> float:
    """Trains CHECKED_STEPS steps of each. Returns the largest difference of their losses over steps and ranks.

    Raises:
      CheckFailed: The difference exceeds LOSS_TOLERANCE, or the losses do not change.
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
    """Returns the seconds of each step on the slowest rank. The steps take turns."""
    threads = horovod_threads.threads_without_preemption()
    turns = {AS_LAUNCHED: steps["tfra"], **steps}
    names = list(turns)
    seconds = np.zeros([len(names), repeats])
    for repeat in range(-warmup, repeats):
        batch = list(map(tf.constant, batches.batch(CHECKED_STEPS + warmup + repeat, fr.collectives.rank())))
        for turn in range(len(names)):
            n = (repeat + turn) % len(names)
            with horovod_threads.with_preemption(threads) if names[n] == AS_LAUNCHED else contextlib.nullcontext():
                fr.collectives.barrier()
                begin = time.perf_counter()
                turns[names[n]](*batch)
                if repeat >= 0:
                    seconds[n, repeat] = time.perf_counter() - begin
                fr.collectives.barrier()
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
    steps = variants([f"f{f:02d}" for f in range(FEATURES)])
    fields: dict[str, Any] = {"ratio": None, "max_loss_difference": largest_difference(steps, batches)}
    example = list(map(tf.constant, batches.batch(0, 0)))
    for name, step in steps.items():
        graph = step.get_concrete_function(*example).graph.as_graph_def()
        fields[f"alltoalls_{name}"] = count_nodes(graph, "HorovodAlltoall")
    seconds = measure(steps, batches, warmup=10, repeats=60 if arguments.quick else 300)
    timings = {name: harness.timing(values) for name, values in seconds.items()}
    fields["ratio"] = timings["tfra"].median_s / timings["ours"].median_s
    fields["ratio_as_launched"] = timings[AS_LAUNCHED].median_s / timings["ours"].median_s
    fields[f"alltoalls_{AS_LAUNCHED}"] = fields["alltoalls_tfra"]
    for name, timing in timings.items():
        fields |= {f"ms_{name}": 1e3 * timing.median_s, f"ms_p90_{name}": 1e3 * timing.p90_s}
    if fr.collectives.rank() > 0:
        return
    setting = {
        "ranks": RANKS, "layers": FEATURES, "batch_size": BATCH_SIZE, "ids_per_layer": IDS_PER_FEATURE, "dim": DIM,
    }  # fmt: skip
    rows = [
        {
            "": name, "ms": fields[f"ms_{name}"], "p90": fields[f"ms_p90_{name}"],
            "all-to-alls": fields[f"alltoalls_{name}"],
        }
        for name in timings
    ]  # fmt: skip
    harness.print_table(f"tfra_swap: {setting}", rows)
    print(f"  ratio {fields['ratio']:.2f}, against TFRA as launched {fields['ratio_as_launched']:.2f}")
    print(f"  losses differ by {fields['max_loss_difference']:.1e} at most")
    harness.write_json(arguments.json, {**fields, "setting": setting})


if __name__ == "__main__":
    harness.run(main)
