"""Question: what does a training step with many features cost with TFRA, TFRA-fused and FusedEmbedding?

    python -m benchmarks.train_step [--peer PYTHON] [--stock-horovod FOLDER] [--quick] [--json FILE]

On two ranks, TFRA makes an exchange per feature. TFRA-fused joins all features with TFRA's own parts (FusedRec section
4). `swapped` is the TFRA program with our import and `fuse`, which keeps TFRA's tables, optimizer and rule over ranks;
`native_fuse` is the same program with rows in native tables.
FusedEmbedding runs over TFRA's table and over its own. All train the same weights on the mean over ranks of each rank's
mean loss. TFRA sums over ranks, so that its variants divide the loss by the number of ranks.

A check comes first: the losses of all variants must agree at every step. Then the variants take turns on new batches.
TFRA has its best settings: the same Horovod, with this project's patch and cycle time, allocator and threads.
With --stock-horovod (`pip install --target FOLDER` of its source release), TFRA runs once more as its users launch it,
on separate ranks before and after the others: without the patch, with Horovod's cycle time and TensorFlow's threads.

`stages_ms`: clocks inside the graph of the native step. `phases_ms`: lookup, forward and backward pass by variant
(MTGRBoost, section 6, figure 12). Graphs of the lookup, of the lookup with the dense layers, and of the whole step take
turns. "lookup" is the time of the first, with the exchange, the others what the next graph takes longer.

--peer names an interpreter with torch, fbgemm-gpu-cpu and torchrec (see peer_torch.py). `torchrec` has a record for
each of SHAPES. Both sides train with row-wise Adagrad, and their losses are compared first. They take turns of a few
steps. Our ranks are stopped during the turn of TorchRec, because an idle rank of Horovod uses its core. TorchRec has
a thread per process.

Fields of a record, and of the file:
  ms_<side>, p10_ms_<side>  median and 10th percentile of a step of the slowest rank
  cpu_ms_<side>             median processor time of a step, mean over ranks
  ratio_vs_torchrec, cpu_ratio_vs_torchrec  time of TorchRec / ours. The file has them of the first shape.
  mean_ratio_vs_torchrec    mean over all shapes
"""

from __future__ import annotations

import abc
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # for TFRA

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, processes, ranks
from benchmarks.harness.harness import Batches
from benchmarks.harness.processes import Remote
from benchmarks.harness.stage_times import MarkedStep, stage_ms
from benchmarks.train_step import peer_torch
from benchmarks.train_step.peer_torch import (
    FEATURES,
    HIDDEN_UNITS,
    INITIAL_VALUE,
    LEARNING_RATE,
    NAMES,
    RANKS,
    Shape,
    tower_weights,
)
from tf_fusedrec import keras, optimizers, tf
from tf_fusedrec.exchange.collectives import all_to_all
from tf_fusedrec.tfra import fuse
from tf_fusedrec.tfra.fused_layer import FusedTfraEmbedding
from tf_fusedrec.tfra.tfra_library import de

ZIPF_ALPHA = 1.05
SHAPES = tuple(
    Shape(dim, batch_size, ids_per_feature, alpha)
    for dim, batch_size, ids_per_feature in ((16, 512, 4), (64, 512, 4), (64, 2048, 20), (128, 4096, 1))
    for alpha in (ZIPF_ALPHA, 0.0)
)
# Steps whose losses are compared with TorchRec's. Sums of float32 in another order differ more with every step.
CHECKED = 6
PHASES = ("lookup", "forward", "backward")
Batch = Callable[[int], tuple[dict[str, tf.Tensor], tf.Tensor]]
DIM = SHAPES[0].dim
ROWS_PER_FEATURE = 1 << 16  # allocated at once by all variants, so that no table grows during the measurement
# Multiplication by an odd number is a bijection, so that two keys of one feature never collide.
_MIX = np.int64(-7046029254386353131)


def _optimizer() -> keras.optimizers.legacy.Optimizer:
    return keras.optimizers.legacy.Adagrad(LEARNING_RATE)


def _tower(inputs: int) -> keras.Sequential:
    """Returns the dense layers, with the same weights for all variants and ranks."""
    tower = keras.Sequential([keras.layers.Dense(HIDDEN_UNITS, activation="relu"), keras.layers.Dense(1)])
    tower.build((None, inputs))
    tower.set_weights(tower_weights(inputs))
    return tower


class Variant(abc.ABC):
    """A model and its step(ids, labels), with ids <int64>[B, L] by feature and labels <float>[B]."""

    name: str
    dim = DIM

    def __init__(self, features: Sequence[str]):
        self.tower = _tower(len(features) * self.dim)
        # No variant needs AutoGraph, which takes half a minute to convert TFRA's code.
        self.step = tf.function(tf.autograph.experimental.do_not_convert(self.plain_step), autograph=False)

    @abc.abstractmethod
    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns <float32>[B, F * D], the mean row of every feature."""

    @abc.abstractmethod
    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None: ...

    def loss(self, ids: Mapping[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        """Returns the mean loss of the batch, <float32>[]."""
        logits = tf.squeeze(self.tower(self.pooled(ids)), axis=1)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))

    def plain_step(self, ids: Mapping[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(self.name):
            with tf.GradientTape() as tape:
                loss = self.loss(ids, labels)
            self.train(tape, loss)
        return loss


class _Tfra(Variant):
    """Base of the TFRA variants, with its layer and its optimizer in synchronous mode."""

    layer_class = de.keras.layers.HvdAllToAllEmbedding
    embedding: keras.layers.Layer

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self.optimizer = de.DynamicEmbeddingOptimizer(_optimizer(), synchronous=True)

    def _layer(self, name: str, capacity: int) -> keras.layers.Layer:
        return self.layer_class(
            embedding_size=DIM, key_dtype=tf.int64, value_dtype=tf.float32, devices=["/CPU:0"], init_capacity=capacity,
            initializer=keras.initializers.Constant(INITIAL_VALUE), name=name,
        )  # fmt: skip

    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = [*self.tower.trainable_variables, *self.embedding.trainable_variables]
        share = tf.constant(1.0 / fr.size())
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables, output_gradients=share), variables))


class MeanRows(keras.Model):
    """The mean row of every feature, [B, F * D], from a layer for each."""

    def __init__(self, of_features: Sequence[keras.layers.Layer], name: str):
        super().__init__(name=name)
        self.of_features = of_features

    def call(self, ids: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat([tf.reduce_mean(layer(part), axis=1) for layer, part in zip(self.of_features, ids)], axis=1)


class Tfra(_Tfra):
    """TFRA as its users write it: one HvdAllToAllEmbedding per feature."""

    name = "tfra"

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        layers = [self._layer(f"{self.name}_{feature}", ROWS_PER_FEATURE) for feature in features]
        self.embedding = MeanRows(layers, self.name)

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        return self.embedding(list(ids.values()))


class Swapped(Tfra):
    """A TFRA program with our import and `fuse`: our layers over TFRA's tables share their exchange."""

    name = "swapped"
    layer_class = FusedTfraEmbedding

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        fuse(self.embedding)


class NativeFuse(Tfra):
    """As Swapped, with rows in native tables."""

    name = "native_fuse"
    layer_class = FusedTfraEmbedding

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        fuse(self.embedding, tables="native", optimizer=self.optimizer)


class TfraFused(_Tfra):
    """TFRA-fused (FusedRec section 4), from TFRA's own parts: one layer for all features.

    The source hashes the category into the key, so that one tf.unique removes the duplicates of all features. A hash
    has no inverse. So one more all-to-all sends each owner the number of its keys by category, and the owner adds them
    to its category statistics.
    """

    name = "tfra_fused"

    def __init__(self, features: Sequence[str]):
        super().__init__(features)
        self.embedding = self._layer("tfra_fused", ROWS_PER_FEATURE * len(features))
        self._salts = np.random.default_rng(0).integers(0, 1 << 62, len(features), np.int64)
        self.category_counts = tf.Variable(tf.zeros([len(features)], tf.int64), trainable=False)

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        stacked = tf.stack(list(ids.values()))  # [F, B, L]
        mixed = tf.bitwise.bitwise_xor(stacked, self._salts[:, np.newaxis, np.newaxis]) * _MIX
        # TFRA chooses the owner by the low bits of a key, which a product mixes least.
        merged = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(32, tf.int64)))
        keys, index = tf.unique(tf.reshape(merged, [-1]))
        self._send_categories(keys, tf.reshape(index, [len(ids), -1]))
        rows = tf.gather(self.embedding.hvd_variable.embedding_lookup(keys)[0], index)
        by_sample = tf.reshape(rows, tf.concat([tf.shape(stacked), [DIM]], axis=0))
        pooled = tf.transpose(tf.reduce_mean(by_sample, axis=2), [1, 0, 2])  # [B, F, D]
        return tf.reshape(pooled, [-1, len(ids) * DIM])

    def _send_categories(self, keys: tf.Tensor, index: tf.Tensor) -> None:
        """Sends each owner its counts [F]. `keys` are in the order of first occurrence, hence grouped by category."""
        ranks, categories = fr.size(), index.shape[0]
        ends = tf.reduce_max(index, axis=1) + 1
        category = tf.repeat(tf.range(categories), ends - tf.concat([[0], ends[:-1]], axis=0))
        owner = self.embedding.params.partition_fn(keys, ranks)
        counts = tf.math.bincount(owner * categories + category, minlength=ranks * categories, dtype=tf.int64)
        splits = tf.fill([ranks], categories)
        received, _ = all_to_all(counts, splits, name=f"{self.name}/categories")
        self.category_counts.assign_add(tf.reduce_sum(tf.reshape(received, [ranks, categories]), axis=0))


class Fused(Variant):
    """FusedEmbedding over native tables, which are its default."""

    name = "ours"
    backend = "native"
    rule = staticmethod(_optimizer)

    def __init__(self, features: Sequence[str], capacity: int = ROWS_PER_FEATURE * FEATURES):
        super().__init__(features)
        self.embedding = fr.FusedEmbedding(
            tables=[
                fr.TableConfig(
                    name=f, dim=self.dim, optimizer=self.rule(), initializer=fr.Constant(value=INITIAL_VALUE)
                )
                for f in features
            ],
            features=[fr.FeatureConfig(name=f, table=f, combiner="mean") for f in features],
            backend=self.backend,
            init_capacity_per_rank=capacity,
            name=f"benchmark_{self.backend}",
        )
        self.optimizer = fr.collectives.distributed_optimizer(_optimizer())

    def pooled(self, ids: Mapping[str, tf.Tensor]) -> tf.Tensor:
        rows = self.embedding(ids)
        return tf.concat([rows[f] for f in ids], axis=1)

    def train(self, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = [*self.tower.trainable_variables, *self.embedding.trainable_variables]
        self.optimizer.minimize(loss, variables, tape=tape)


class FusedOverTfra(Fused):
    """FusedEmbedding over a TFRA variable, with the same exchange and another table."""

    name = "ours_tfra"
    backend = "tfra"


class BesideTorchRec(Fused):
    """Fused with TorchRec's rule for rows, at any shape. Its tables have room for all ids at once."""

    @staticmethod
    def rule() -> optimizers.RowWiseAdagrad:
        return optimizers.RowWiseAdagrad(LEARNING_RATE, epsilon=peer_torch.ROW_EPSILON)

    def __init__(self, features: Sequence[str], dim: int, capacity: int):
        self.dim = dim
        super().__init__(features, capacity)


VARIANTS = (Tfra, TfraFused, Swapped, NativeFuse, FusedOverTfra, Fused)


def stages_ms(variant: Variant, batch: Batch, *, warmup: int, repeats: int) -> dict[str, float]:
    """Returns the milliseconds that each stage adds to a step, mean over ranks."""
    marked, runs = MarkedStep(variant.plain_step), []
    for repeat in range(-warmup, repeats):
        fr.collectives.barrier()
        # These batches were not measured before, so that they have as many new ids as any other batch.
        run = marked.run(*batch(10_000 + repeat))
        runs += [run] if repeat >= 0 else []
    by_rank = fr.collectives.all_gather_object(stage_ms(runs))
    return {stage: float(np.mean([ms.get(stage, 0.0) for ms in by_rank])) for stage in by_rank[0]}


def phases_ms(variants: Sequence[Variant], batch: Batch, *, warmup: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns milliseconds by variant and phase, medians over batches of the slowest rank."""

    def traced(python: Callable) -> Callable:
        return tf.function(tf.autograph.experimental.do_not_convert(python), autograph=False)

    calls: dict[str, Callable] = {}
    for variant in variants:
        pooled = traced(variant.pooled)
        calls[f"{variant.name} lookup"] = lambda ids, labels, pooled=pooled: pooled(ids)
        calls |= {f"{variant.name} forward": traced(variant.loss), f"{variant.name} backward": variant.step}
    ms = ranks.turns(calls, warmup=warmup, repeats=repeats, inputs=lambda n: batch(20_000 + warmup + n)).ms
    until = {variant.name: [ms[f"{variant.name} {phase}"] for phase in PHASES] for variant in variants}
    return {name: dict(zip(PHASES, np.diff(ends, prepend=0.0).tolist())) for name, ends in until.items()}


def on_this_rank(batches: Batches) -> Batch:
    """Returns the arguments of a step on this rank by number."""

    def batch(number: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        drawn = batches.batch(number, fr.rank())
        return {name: tf.constant(ids) for name, ids in zip(NAMES, drawn.ids)}, tf.constant(drawn.labels)

    return batch


def steps_of_turn(shape: Shape) -> int:
    """Returns the steps of a side before the other's turn: few of large batches, so that all shapes take 15 minutes."""
    return min(20, max(3, (1 << 21) // (FEATURES * shape.batch_size * shape.ids_per_feature)))


def beside_torchrec(python: str, shape: dict[str, Any], folder: str, turns: int) -> dict[str, Any]:
    """Returns one record of `torchrec`. Every rank of ours starts one of TorchRec's, which meet in `folder`."""
    fr.init()
    sizes = Shape(**shape)
    batches, steps = sizes.batches(), steps_of_turn(sizes)
    batch, ours = on_this_rank(batches), BesideTorchRec(NAMES, sizes.dim, sum(batches.vocabularies) // RANKS)
    request = {
        "shape": shape, "folder": folder, "rank": fr.rank(), "checked": CHECKED,
        "threads": max(1, len(os.sched_getaffinity(0)) // RANKS),
    }  # fmt: skip
    with Remote(python, peer_torch.peer, variables={"GLOO_SOCKET_IFNAME": "lo"}, **request) as theirs:
        theirs.check_libraries()
        losses = {"ours": [float(ours.step(*batch(n))) for n in range(CHECKED)], "torchrec": theirs.check()}
        sharding, difference = theirs.facts["sharding"], ranks.check_losses(losses)
        times: dict[str, list[ranks.Turns]] = {name: [] for name in losses}
        numbers = itertools.count(CHECKED)
        for turn, name in harness.in_turns(list(losses), turns, warmup=1):
            if name == "ours":
                taken = ranks.turns({name: ours.step}, warmup=0, repeats=steps, inputs=lambda _: batch(next(numbers)))
            else:
                fr.collectives.barrier()
                taken = ranks.of_all_ranks([name], np.array(theirs.times(name, steps)).T[:, np.newaxis])
            times[name] += [taken] if turn >= 0 else []
    return {**shape, "sharding": sharding, "max_loss_difference": difference, **figures(times)}


def figures(times: Mapping[str, Sequence[ranks.Turns]]) -> dict[str, float]:
    """Returns the figures of both sides and their ratios, from the turns of each."""
    fields: dict[str, float] = {}
    for name, turns in times.items():
        wall, cpu = (1e3 * np.concatenate([getattr(turn, clock)[name] for turn in turns]) for clock in ("wall", "cpu"))
        fields |= {f"ms_{name}": float(np.median(wall)), f"p10_ms_{name}": float(np.percentile(wall, 10))}
        fields[f"cpu_ms_{name}"] = float(np.median(cpu))
    return fields | {
        f"{clock}ratio_vs_torchrec": fields[f"{clock}ms_torchrec"] / fields[f"{clock}ms_ours"] for clock in ("", "cpu_")
    }


def versus_torchrec(python: str, quick: bool) -> dict[str, Any]:
    """Compares all shapes, each on new ranks."""
    records = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            request: dict[str, Any] = {"shape": shape._asdict(), "folder": folder, "turns": 2 if quick else 10}
            records.append(processes.ask_ranks(beside_torchrec, RANKS, python=python, **request))
        harness.print_fields(f"beside TorchRec: {shape}", records[-1])
    first = {name: records[0][name] for name in ("ratio_vs_torchrec", "cpu_ratio_vs_torchrec")}
    mean = float(np.mean([record["ratio_vs_torchrec"] for record in records]))
    return {"torchrec": records, **first, "mean_ratio_vs_torchrec": mean}


def on_rank(quick: bool) -> dict[str, Any]:
    fr.init()
    tf.get_logger().setLevel("ERROR")  # TFRA warns once per layer about savers, which this run does not use
    shape, repeats = SHAPES[0], 200 if quick else 600
    batch = on_this_rank(shape.batches())
    variants: list[Variant] = [variant(NAMES) for variant in VARIANTS]
    fields = ranks.compare_steps({one.name: one.step for one in variants}, batch, warmup=20, repeats=repeats)
    fields["ratio_native_fuse"] = fields["ms_tfra"] / fields["ms_native_fuse"]
    fields["stages_ms"] = stages_ms(variants[-1], batch, warmup=10, repeats=repeats // 4)
    fields["phases_ms"] = phases_ms(variants, batch, warmup=10, repeats=repeats // 4)
    fields["setting"] = {
        "ranks": RANKS, "features": FEATURES, "batch_size": shape.batch_size,
        "ids_per_feature": shape.ids_per_feature, "zipf_alpha": shape.zipf_alpha, "repeats": repeats,
    }  # fmt: skip
    return fields


def tfra_on_rank(repeats: int) -> float:
    """Returns the median milliseconds of a step of TFRA."""
    fr.init()
    tf.get_logger().setLevel("ERROR")
    batch, tfra = on_this_rank(SHAPES[0].batches()), Tfra(NAMES)
    return ranks.turns({"tfra": tfra.step}, warmup=20, repeats=repeats, inputs=lambda n: batch(20 + n)).ms["tfra"]


def as_launched(horovod: str, quick: bool) -> float:
    """Returns the same with the Horovod in a folder, and what fr.init sets as it is without it."""
    variables = {
        "PYTHONPATH": os.pathsep.join([horovod, processes.environment()["PYTHONPATH"]]), "HOROVOD_CYCLE_TIME": "1",
        "TF_NUM_INTRAOP_THREADS": str(os.cpu_count()), "FUSEDREC_EXCHANGE": "horovod",
    }  # fmt: skip
    return processes.ask_ranks(tfra_on_rank, RANKS, variables=variables, repeats=50 if quick else 150)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with torch, fbgemm-gpu-cpu and torchrec")
    parser.add_argument("--stock-horovod", metavar="FOLDER", help="with Horovod as released, for TFRA as launched")
    arguments = parser.parse_args()
    stock = arguments.stock_horovod
    before = as_launched(stock, arguments.quick) if stock else 0.0
    fields = processes.ask_ranks(on_rank, RANKS, quick=arguments.quick)
    if stock:
        fields["ms_tfra_as_launched"] = (before + as_launched(stock, arguments.quick)) / 2
        fields["ratio_vs_tfra_as_launched"] = fields["ms_tfra_as_launched"] / fields["ms_ours"]
        fields["ratio_native_fuse_as_launched"] = fields["ms_tfra_as_launched"] / fields["ms_native_fuse"]
    harness.print_fields(f"train_step: {fields['setting']}", fields)
    harness.print_fields("stages of the native step, ms", fields["stages_ms"])
    harness.print_table("phases, ms", [{"variant": name, **ms} for name, ms in fields["phases_ms"].items()])
    if arguments.peer:
        fields |= versus_torchrec(arguments.peer, arguments.quick)
    harness.write_json(arguments.json, fields)


if __name__ == "__main__":
    processes.program(main)
