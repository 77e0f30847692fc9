"""An accelerator that is not there: ops that take time and no core (device_stream.cc), and a model on them.

    hidden = layer(rows, weight, seconds, first=True)   on the stream DEVICE, forward; its gradient backward
    ids = wait(ids, seconds, MEMORY)                    on another stream

A stream is a queue. An op begins when it has been launched and the op before it has ended. A layer is launched as soon
as the layer before it is, so the device goes from one to the next without the host, as a GPU does. The host waits where
it reads a result: the gradients of rows and weights. No core works while an op runs.
`stamping` records the begin and the end of every collective that is traced inside. `take_record` returns all spans, on
the monotonic clock. The ops are compiled at first use, into build/benchmarks.

The model has real tables and exchanges. Its dense part is a chain of layers, whose weights are averaged over ranks as
in a real model. Their gradients come one layer after another. A layer takes a fixed time and a time per token, forward
and backward (real_model.compute_times). The table may lie behind a slow memory: each id of a lookup then takes a time,
in which no core works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.harness.harness import ZipfIds, id_of, repeated
from tf_fusedrec import keras, ops, tf
from tf_fusedrec.data import cluster_samples
from tf_fusedrec.models.base import Batch, SequenceModel

SOURCE = pathlib.Path(__file__).with_name("device_stream.cc")
BUILD = harness.ROOT / "build/benchmarks"
DEVICE, MEMORY = "device", "memory"  # names of streams

Span = tuple[float, float]  # begin and end, in seconds of time.monotonic()


class Record(NamedTuple):
    """What ran, by name of the stream or collective."""

    spans: dict[str, list[Span]]  # in order
    sent: dict[str, float]  # bytes of the first tensor of a collective, mean over its calls; 0 of a stream


def compiled() -> pathlib.Path:
    """Returns the library of the ops. Compiles it if its source or its command has changed."""
    headers = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in tf.sysconfig.get_compile_flags()]
    flags = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared"]  # the relevant flags of setup.py
    command = [os.environ.get("CXX", "g++"), *headers, *flags, str(SOURCE), *tf.sysconfig.get_link_flags()]
    key = hashlib.sha256(SOURCE.read_bytes() + shlex.join(command).encode()).hexdigest()[:16]
    library = BUILD / f"device_stream-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        try:
            subprocess.run(
                [*command, "-o", str(unfinished)], check=True, capture_output=True, encoding="utf-8", errors="replace"
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            raise harness.CheckFailed(f"{SOURCE.name} does not compile. Install g++ or set CXX.\n{reason}") from error
        unfinished.replace(library)  # at once, because other ranks may wait for the file
    return library


@functools.cache
def _ops() -> Any:
    return tf.load_op_library(str(compiled()))


def _launch(inputs: list[tf.Tensor], seconds: tf.Tensor) -> tf.Tensor:
    """Launches an op on the stream DEVICE as soon as the inputs exist. Returns when it ends."""
    with tf.control_dependencies(inputs):
        # The value is an input, because TensorFlow would launch an op of constants ahead of the step.
        return _ops().fusedrec_bench_launch(value=inputs[0], seconds=seconds, stream=DEVICE)


def layer(rows: tf.Tensor, weight: tf.Tensor, seconds: tf.Tensor, *, first: bool) -> tf.Tensor:
    """A dense layer on the stream DEVICE: hidden[i] = sum(rows[i]) / sqrt(D) + mean(weight), <float>[n].

    rows: <float>[n, D]. weight: <float>[P], P >= 1. seconds: <double>[2], time of the forward and of the backward pass.
    When the backward pass has ended, the host reads the gradient of the weight, and of the rows of the first layer.
    """

    @tf.custom_gradient
    def of(rows: tf.Tensor, weight: tf.Tensor) -> Any:
        scale = tf.math.rsqrt(tf.cast(tf.shape(rows)[1], tf.float32))
        hidden = scale * tf.reduce_sum(rows, axis=1) + tf.reduce_mean(weight)

        def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            of_rows = tf.broadcast_to(scale * upstream[:, tf.newaxis], tf.shape(rows))
            of_weight = tf.fill(tf.shape(weight), tf.reduce_sum(upstream) / tf.cast(tf.size(weight), tf.float32))
            ends = _launch([upstream, rows, weight], seconds[1])
            to_below = _ops().fusedrec_bench_ended if first else _ops().fusedrec_bench_launched
            return to_below(value=of_rows, ends=ends), _ops().fusedrec_bench_ended(value=of_weight, ends=ends)

        return _ops().fusedrec_bench_launched(value=hidden, ends=_launch([rows, weight], seconds[0])), gradients

    return of(rows, weight)


@tf.RegisterGradient("FusedrecBench>Stamp")
def _stamp_grad(_: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
    return grad


def wait(value: tf.Tensor, seconds: tf.Tensor, stream: str) -> tf.Tensor:
    """Hands a tensor on after its turn of `seconds` <double>[] on a stream; at once where they are 0."""
    ends = _ops().fusedrec_bench_launch(value=value, seconds=seconds, stream=stream)
    return _ops().fusedrec_bench_ended(value=value, ends=ends)


@contextlib.contextmanager
def stamping() -> Iterator[None]:
    """Lets collectives traced inside record their spans: from the time when this rank asks until the data are here."""
    marked = ops.mark_collective

    def stamped(value: tf.Tensor, *, name: str, ended: bool) -> tf.Tensor:
        # The innermost times: behind the mark of the begin, and before the mark of the end.
        if ended:
            return marked(_ops().fusedrec_bench_stamp(value=value, event=name, ended=True), name=name, ended=True)
        return _ops().fusedrec_bench_stamp(value=marked(value, name=name, ended=False), event=name, ended=False)

    with mock.patch.object(ops, "mark_collective", stamped):
        yield


def take_record() -> Record:
    """Returns what ran since the last call. Eager. A span that begins or ends in another record is left out."""
    names, ended, at, bytes_ = (tensor.numpy() for tensor in _ops().fusedrec_bench_take_record())
    begun: dict[str, list[tuple[float, float]]] = {}
    spans: dict[str, list[Span]] = {}
    sent: dict[str, list[float]] = {}
    for name, is_end, time, size in zip(map(bytes.decode, names), ended, at, bytes_):
        if not is_end:
            begun.setdefault(name, []).append((float(time), float(size)))
        elif begun.get(name):
            begin, bytes_sent = begun[name].pop(0)
            spans.setdefault(name, []).append((begin, float(time)))
            sent.setdefault(name, []).append(bytes_sent)
    return Record(spans, {name: sum(sizes) / len(sizes) for name, sizes in sent.items()})


@dataclasses.dataclass(frozen=True)
class DeviceSize:
    users: int
    tokens_per_user: int
    dim: int
    layers: int = 4
    weights: int = 400_000  # of all layers
    batches: int = 4  # repeated for ever, so that their rows exist after the first round
    vocabulary: int = 200_000
    topics: int = 8  # a user has one; users of a topic share ids, which clustering brings together
    ids_of_topic: int = 400
    topical: float = 0.3  # part of a user's ids that come from its topic

    @property
    def tokens(self) -> int:
        return self.users * self.tokens_per_user


class Compute(NamedTuple):
    """Seconds of the dense part of n tokens: fixed + per_token * n, for the forward and for the backward pass."""

    fixed: tuple[float, float]
    per_token: tuple[float, float]

    def seconds(self, tokens: int, micro_batches: int = 1) -> float:
        """Returns the time of a batch, forward and backward."""
        return micro_batches * sum(self.fixed) + tokens * sum(self.per_token)


class Pace:
    """The times of a step's parts. They may change between two steps of a traced function."""

    def __init__(self) -> None:
        self.device = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # factor of all times of Compute
        self.memory = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # seconds per id that a lookup reads

    def set(self, *, device: float, memory: float) -> None:
        self.device.assign(device)
        self.memory.assign(memory)


class SlowMemory:
    """A table whose lookups wait for their rows, on a stream of their own. No core works meanwhile.

    A lookup after a look-ahead does not wait: it reads only rows that were updated since, and those are in memory.
    """

    def __init__(self, table: Any, pace: Pace):
        self._table, self._pace = table, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def lookup(self, request: Any, ahead: Any = None, **options: Any) -> Any:
        return self._table.lookup(request if ahead is not None else self._read(request), ahead, **options)

    def look_ahead(self, request: Any) -> Any:
        return self._table.look_ahead(self._read(request))

    def _read(self, request: Any) -> Any:
        message, splits = request
        seconds = self._pace.memory * tf.cast(tf.size(message), tf.float64)
        return wait(message, seconds, MEMORY), splits


class DeviceModel(SequenceModel):
    """Scores every token by its row and the weights of all layers."""

    def __init__(self, size: DeviceSize, compute: Compute, pace: Pace, embedding: fr.FusedEmbedding):
        super().__init__(embedding, f"model_of_{embedding.name}")
        each = size.weights // size.layers
        self._layer_weights = [
            self.add_weight(name=f"layer_{i}", shape=[each], initializer="zeros") for i in range(size.layers)
        ]
        self._compute, self._pace = compute, pace
        self.row_sums = keras.metrics.Sum(name="row_sums", dtype=tf.float64)  # of |sum of a row| over all tokens

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*super().metrics, self.row_sums]

    def call(self, inputs: Batch, training: bool | None = None) -> dict[str, tf.Tensor]:
        hidden = self.embedding({"item": inputs["item"]})["item"].values
        tokens = tf.cast(tf.shape(hidden)[0], tf.float64)
        fixed, per_token = (tf.constant(part, tf.float64) for part in self._compute)
        seconds = self._pace.device * (fixed + per_token * tokens) / len(self._layer_weights)
        outputs: list[tf.Tensor] = []
        for weight in self._layer_weights:
            hidden = layer(hidden, tf.convert_to_tensor(weight), seconds, first=not outputs)
            outputs.append(hidden)
            hidden = hidden[:, tf.newaxis]
        return {"of_rows": outputs[0], "logits": outputs[-1]}

    def position_losses(self, batch: Batch, outputs: dict[str, tf.Tensor]) -> tf.Tensor:
        self.row_sums.update_state(tf.reduce_sum(tf.abs(outputs["of_rows"])))
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["click"].values, logits=outputs["logits"])

    def num_positions(self, batch: Batch) -> tf.Tensor:
        return tf.size(batch["item"].values, tf.int64)

    def counts(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        return batch["item"].nrows(), tf.size(batch["item"].values, tf.int64)

    def forward_flops(self, batch: Batch) -> tf.Tensor:
        return tf.zeros([], tf.float64)


def make_batch(size: DeviceSize, seed: int) -> dict[str, tf.RaggedTensor]:
    """Returns a batch of users with equally long sequences, a pure function of the seed and the rank."""
    random = np.random.default_rng([seed, fr.rank()])
    items = ZipfIds(size.vocabulary, 0.3).draw(random, (size.users, size.tokens_per_user))
    topics = random.integers(0, size.topics, [size.users, 1])
    of_topic = size.vocabulary + topics * size.ids_of_topic + random.integers(0, size.ids_of_topic, items.shape)
    items = np.where(random.random(items.shape) < size.topical, id_of(of_topic), items)
    clicks = (random.random(items.shape) < 0.3).astype(np.float32)
    splits = tf.range(size.users + 1, dtype=tf.int64) * size.tokens_per_user
    return {
        name: tf.RaggedTensor.from_row_splits(tf.constant(values.reshape(-1)), splits, validate=False)
        for name, values in (("item", items), ("click", clicks))
    }


def dataset(size: DeviceSize, clustered_for: int = 0) -> tf.data.Dataset:
    """Repeats the batches for ever, without any compute. Their samples are clustered once, for M micro-batches."""

    def cluster(whole: tf.data.Dataset) -> tf.data.Dataset:
        return cluster_samples(whole, clustered_for, ids=lambda batch: {"item": batch["item"]})

    return repeated([make_batch(size, seed) for seed in range(size.batches)], cluster if clustered_for else None)


def make_model(size: DeviceSize, compute: Compute, pace: Pace, name: str, schedule: Any, **layer: Any) -> DeviceModel:
    """Makes a model whose rows and weights begin the same each time. `layer` has options of FusedEmbedding."""
    # The first step of a row is as long as the learning rate, so that a missing update shows in the sums of rows.
    adagrad = fr.optimizers.Adagrad(3e-4, initial_accumulator_value=1e-12)
    table = fr.TableConfig("item", size.dim, adagrad, initializer=fr.TruncatedNormal(stddev=0.02))
    embedding = fr.FusedEmbedding([fr.FeatureConfig("item", "item")], [table], name=name, **layer)
    for group in embedding.internals.groups:
        group.table = SlowMemory(group.table, pace)  # type: ignore[assignment]
    model = DeviceModel(size, compute, pace, embedding)
    model.schedule = schedule
    model.compile(fr.collectives.distributed_optimizer(keras.optimizers.Adam(1e-3)))
    model(make_batch(size, 0), training=False)  # makes the weights' optimizer ready
    # The step needs no AutoGraph, whose conversion takes longer than the measurement.
    model.train_step = tf.autograph.experimental.do_not_convert(model.train_step)  # type: ignore[method-assign]
    return model
