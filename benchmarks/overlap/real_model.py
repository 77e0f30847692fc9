"""The real model of benchmarks.overlap: a GRM with wide rows, the contended case and timelines.

In the contended case, two ranks compute on the two cores that also move the bytes. Both train the GRM on real ops, and
their loop-back is limited. So the case shows the gain of a schedule on a machine without an accelerator. It is a lower
bound, because exchanges take cores from the compute that hides them.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness, network, processes, ranks
from benchmarks.harness.harness import ZipfIds, repeated
from benchmarks.overlap.figures import EXACT, STALE
from tf_fusedrec import keras, tf
from tf_fusedrec.callbacks.timeline import Timeline
from tf_fusedrec.models.experiment.model_config import GRMConfig
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.schedules import DualBuffer, FrozenWindow, Nested, SemiAsync, Sync

FEATURES = ("history_item", "history_action", "exposed_item")
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Size:
    users: int
    history: int  # tokens per user
    exposures: int  # tokens per user after the history
    dim: int
    heads: int  # of 32 columns; they scale a block's compute without more ops
    blocks: int = 1
    batches: int = 4  # repeated for ever, so that their rows exist after the first round
    vocabulary: int = 200_000
    zipf_alpha: float = 0.3

    @property
    def tokens(self) -> int:
        return self.users * (self.history + self.exposures)


SIZE = Size(users=64, history=120, exposures=8, dim=512, heads=6)


def config(size: Size) -> GRMConfig:
    return GRMConfig(
        max_history=size.history, max_exposures=size.exposures, dim=size.dim, num_blocks=size.blocks,
        num_heads=size.heads, qk_dim=32, value_dim=32, time_buckets=0, num_experts=2, expert_units=32, top_k=1,
    )  # fmt: skip


def make_batch(size: Size, seed: int) -> dict[str, Any]:
    """Returns a batch of users with equally long sequences, a pure function of the seed and the rank."""
    random = np.random.default_rng([seed, fr.rank()])
    items = ZipfIds(size.vocabulary, size.zipf_alpha)

    def ragged(length: int, values: np.ndarray) -> tf.RaggedTensor:
        splits = np.arange(size.users + 1, dtype=np.int64) * length
        return tf.RaggedTensor.from_row_splits(tf.constant(values), tf.constant(splits), validate=False)

    def times(length: int, begin: int) -> np.ndarray:
        return begin + np.sort(random.integers(0, 10**6, (size.users, length))).reshape(-1)

    past, shown = size.users * size.history, size.users * size.exposures
    return {
        "user_id": tf.constant(random.integers(0, 10**6, size.users)),
        "history_item": ragged(size.history, items.draw(random, (past,))),
        "history_action": ragged(size.history, random.integers(0, 4, past)),
        "history_time": ragged(size.history, times(size.history, 0)),
        "exposed_item": ragged(size.exposures, items.draw(random, (shown,))),
        "exposed_time": ragged(size.exposures, times(size.exposures, 2 * 10**6)),
        "exposed_click": ragged(size.exposures, random.integers(0, 2, shown).astype(np.float32)),
        "exposed_conversion": ragged(size.exposures, random.integers(0, 2, shown).astype(np.float32)),
    }


def dataset(size: Size) -> tf.data.Dataset:
    """Repeats the batches for ever, without any compute."""
    return repeated([make_batch(size, seed) for seed in range(size.batches)])


def make_embedding(size: Size, name: str) -> fr.FusedEmbedding:
    spec: dict[str, Any] = {
        "dim": size.dim,
        "optimizer": fr.optimizers.Adagrad(0.01, 0.1),
        "initializer": fr.TruncatedNormal(stddev=0.02),
    }
    table_of = {"history_item": "item", "exposed_item": "item", "history_action": "action"}
    return fr.FusedEmbedding(
        [fr.FeatureConfig(name=feature, table=table_of[feature]) for feature in FEATURES],
        [fr.TableConfig(name=one, **spec) for one in ("item", "action")],
        name=name,
    )


def make_model(size: Size, embedding: keras.layers.Layer, schedule: Any) -> GRM:
    keras.utils.set_random_seed(1)
    model = GRM(config(size), embedding, np.arange(1), np.ones(1, np.int64))
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(1e-3)))
    model(make_batch(size, 0), training=False)  # draws the weights
    # The step needs no AutoGraph, whose conversion takes longer than the measurement.
    model.train_step = tf.autograph.experimental.do_not_convert(model.train_step)  # type: ignore[method-assign]
    return model


def training(model: GRM, batches: tf.data.Dataset) -> Step:
    function, iterator = model.make_train_function(), iter(batches)
    return lambda: function(iterator)


RANKS = 2
RATE = "1gbit"
SCHEDULES = {
    "sync": Sync(),
    "frozen_M4": FrozenWindow(4),
    "dual": DualBuffer(),
    "nested_M4": Nested(4),
    "semi_async": SemiAsync(),
}


def contended(size: Size, names: Sequence[str], repeats: int) -> dict[str, float]:
    """Runs two ranks in a namespace of their own. Returns contended_ms and contended_speedup of every schedule."""
    with network.slow_loopback(RATE) as name:
        ms = processes.ask_ranks(
            on_rank, RANKS, inside=network.inside(name, []), timeout_s=900, size=dataclasses.asdict(size),
            names=list(names), repeats=repeats,
        )  # fmt: skip
    times = {f"contended_ms_{name}": ms[name] for name in names}
    return times | {f"contended_speedup_{name}": ms["sync"] / ms[name] for name in names}


def on_rank(size: dict[str, Any], names: list[str], repeats: int) -> dict[str, float]:
    """Checks every step, then times them in turns. Returns the median milliseconds of the slowest rank."""
    # One core per rank computes. A second thread lets lookups run beside the compute of another micro-batch.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init()
    keras.utils.disable_interactive_logging()
    of_size = Size(**size)
    batches = dataset(of_size)
    models = {name: make_model(of_size, make_embedding(of_size, name), SCHEDULES[name]) for name in names}
    steps = {name: training(model, batches) for name, model in models.items()}
    for step in steps.values():
        for _ in range(of_size.batches):
            step()
    losses = {name: float(model.metrics[0].result()) for name, model in models.items()}
    for name, loss in losses.items():
        reason = "order of sums; rows of semi_async"
        tolerance = STALE if name == "semi_async" else EXACT
        harness.check_close(f"mean loss of {name}", loss, losses["sync"], relative=tolerance, reason=reason)
    ms = ranks.turns(steps, warmup=0, repeats=repeats).ms
    return ms


PICTURES = {"sync": "sync", "frozen_window": "frozen_M4", "nested": "nested_M4"}
FIRST, LAST = 4, 7  # steps that a picture shows; the ones before create the rows


def draw_timelines(folder: pathlib.Path) -> None:
    """Draws a step under three schedules, timeline_<name>.png, recorded by rank 0 of the contended case."""
    with network.slow_loopback(RATE) as name:
        processes.ask_ranks(
            record, RANKS, inside=network.inside(name, []), size=dataclasses.asdict(SIZE), folder=str(folder.resolve())
        )


def record(size: dict[str, Any], folder: str) -> list[str] | None:
    """Runs one rank: trains each variant for a few steps. Rank 0 writes the pictures and returns their names."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fr.init(timeline=True)
    keras.utils.disable_interactive_logging()
    batches, pictures = dataset(Size(**size)), []
    for name, schedule in PICTURES.items():
        model = make_model(Size(**size), make_embedding(Size(**size), name), SCHEDULES[schedule])
        with tempfile.TemporaryDirectory() as recorded:
            timeline = Timeline(recorded, first_step=FIRST, steps=LAST - FIRST)
            model.fit(batches, steps_per_epoch=LAST, verbose=0, callbacks=[timeline])
            if fr.rank() == 0:
                pictures.append(f"timeline_{name}.png")
                shutil.copy(pathlib.Path(recorded) / "step.png", pathlib.Path(folder) / pictures[-1])
                print(f"{pictures[-1]}: steps of {[round(step.step_ms) for step in timeline.steps]} ms", flush=True)
    return pictures or None
