"""One request of one user: the whole history against a kept state (models/user_state.py), alone and under load.

The open-loop load is on three servers of one GRM: stock operations, ours, and ours with kept states. Requests are sent
at random times, whether or not earlier ones have been answered. Times between requests are exponential (Poisson
arrivals) with a stated rate. A latency counts from the intended time of sending, so a slow answer delays nobody's
clock. The first requests of a run are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from tf_fusedrec import tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.base import Batch
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.experiment import load
from tf_fusedrec.models.experiment.ranking_config import RankingConfig
from tf_fusedrec.models.export import signatures_of
from tf_fusedrec.models.grm import GRM
from tf_fusedrec.models.kept_states import StateOptions
from tf_fusedrec.models.user_state import GRMStates
from tf_fusedrec.saved_model.state_cache import StateCache

IDS = 1000  # rows of a table
DAY = 86_400
Server = Callable[..., dict[str, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Request:
    """Events that the state holds, events since then, candidates, and timed rounds."""

    events: int = 4096
    new: int = 128
    candidates: int = 256
    rounds: int = 30


def long_model(config: str, size: Request) -> tuple[GRM, Batch, Batch, Batch]:
    """Returns a GRM for long histories, a whole request, and its parts: the events of the state, and those since."""
    lengths = [f"model.max_history={size.events + size.new}", f"model.max_exposures={size.candidates}"]
    experiment = load(config, [*lengths, "model.causal_context=true"])
    model = make_model(experiment, make_embedding(experiment), np.arange(1), np.ones(1, np.int64))
    assert isinstance(model, GRM)
    model(no_rows(columns(experiment.model, "train")))
    random = np.random.default_rng(0)
    for table in experiment.tables:
        fill(model, table.name, np.arange(IDS), random)
    whole = batch_of(model.config, np.array([size.events + size.new]), size.candidates, IDS, random)
    history = [name for name in whole if name.startswith("history_")]
    cut = {name: jagged.split(whole[name], [[size.events], [size.new]]) for name in history}
    seen, since = ({**whole, **{name: cut[name][part] for name in history}} for part in range(2))
    nothing = {name: jagged.last(whole[name], 0) for name in whole if name.startswith("exposed_")}
    return model, whole, {**seen, **nothing}, since


def state_fields(config: str, size: Request) -> dict[str, float]:
    """Returns the ratios of a whole request over one with a state, and max_difference_state.

    speedup_state compares median times, speedup_state_processor the processor time of all threads.
    """
    model, whole, seen, since = long_model(config, size)
    states = GRMStates(model)
    _, state = states.update(seen, states.none(1))
    calls = {
        "whole": tf.function(lambda: model(whole, training=False), autograph=False),
        "state": tf.function(lambda: states.update(since, state)[0], autograph=False),
    }
    answers = {name: call() for name, call in calls.items()}
    for task, logits in answers["whole"].items():
        harness.check_close(task, answers["state"][task], logits, relative=1e-4, reason="sums in another order")
    difference = max(float(tf.reduce_max(tf.abs(answers["state"][task] - x))) for task, x in answers["whole"].items())
    # Times on the clock, and of the processor.
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(size.rounds):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            begin = time.perf_counter(), time.process_time()
            calls[name]()["ctr"].numpy()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    ratios = np.median(times["whole"], axis=0) / np.median(times["state"], axis=0)
    return {
        "speedup_state": float(ratios[0]),
        "speedup_state_processor": float(ratios[1]),
        "max_difference_state": difference,
    }


def fill(model: Any, table: str, ids: np.ndarray, random: np.random.Generator) -> None:
    rows = random.normal(0, 0.1, [len(ids), model.config.dim]).astype(np.float32)
    fr.checkpoint.warm_start(model, table, ids, rows)


def batch_of(
    config: RankingConfig, lengths: np.ndarray, candidates: int, items: int, random: np.random.Generator
) -> Batch:  # fmt: skip
    """Returns inputs of users with histories of these lengths, and `candidates` exposures each."""
    row_lengths = {"history": lengths, "exposed": np.full(len(lengths), candidates)}
    batch = {name: tf.constant(random.integers(0, IDS, len(lengths))) for name in config.contextual}
    for role, counts in row_lengths.items():
        total = int(counts.sum())
        values = {name: random.integers(0, IDS, total) for name in config.columns_of(role)}
        values[f"{role}_item"] = random.zipf(1.2, total) % items
        values[f"{role}_time"] = np.full(total, 31 * DAY)
        if role == "history":
            values["history_action"] = random.integers(0, 4, total)
            values["history_time"] = np.sort(random.integers(0, 30 * DAY, total))
        batch |= {
            name: tf.RaggedTensor.from_row_lengths(tf.constant(x, tf.int64), counts) for name, x in values.items()
        }
    return batch


def flat(batch: Batch) -> dict[str, tf.Tensor]:
    """Returns a batch in the form of a server's inputs."""
    values = {name: x.values if isinstance(x, tf.RaggedTensor) else x for name, x in batch.items()}
    return {**values, **{f"{role}_row_splits": batch[f"{role}_time"].row_splits for role in ("history", "exposed")}}


def asking(server: Server, requests: Sequence[Mapping[str, tf.Tensor]]) -> Callable[[], object]:
    """Returns a call that sends the next request, in turns, and waits for its answer."""
    turns = itertools.cycle(requests)
    return lambda: [output.numpy() for output in server(**next(turns)).values()]


@dataclasses.dataclass(frozen=True)
class Load:
    """One run at one rate."""

    requests: int = 1000  # at most
    seconds: float = 20.0  # at most, but for the least number of requests, and apart from the waiting requests
    threads: int = 16  # requests that the client waits for at the same time


def latencies_ms(ask: Callable[[int], object], rate: float, load: Load) -> np.ndarray:
    """Sends requests at `rate` per second, and returns the latency of each after the warm-up, the first eighth.

    Threads call `ask`, which sends the n-th request and waits for its answer.
    """
    total = int(min(load.requests, max(16.0, rate * load.seconds)))
    after = np.cumsum(np.random.default_rng(total).exponential(1 / rate, total))
    begin = time.perf_counter()

    def send(number: int) -> float:
        intended = begin + after[number]
        time.sleep(max(0.0, intended - time.perf_counter()))
        ask(number)
        return 1e3 * (time.perf_counter() - intended)

    with futures.ThreadPoolExecutor(load.threads) as pool:  # its queue keeps the order of the requests
        return np.array(list(pool.map(send, range(total))))[total // 8 :]


KINDS = ("stock", "ours", "state")
SOURCE = 0  # key of the user whose state the others copy
_COPIES = 16  # states of one call of "copy_state"


class Servers:
    """Exports of a GRM, loaded, with one request for each kind."""

    def __init__(self, config: str, size: Request, folder: pathlib.Path, users: int):
        model, whole, seen, since = long_model(config, size)
        self._users, self._tasks = users, list(model.config.tasks)
        options = StateOptions(max_bytes=1 << 40)  # Nothing is evicted.
        signatures = signatures_of(model, "ours", options)
        (cache,) = signatures["with_state"].resources
        assert isinstance(cache, StateCache)
        signatures["copy_state"] = _copy(cache)
        fr.export(model, folder / "stock", signatures=signatures_of(model))
        fr.export(model, folder / "ours", "ours", signatures=signatures)
        stock, ours = (tf.saved_model.load(str(folder / ops)).signatures for ops in ("stock", "ours"))
        self._stock, self._ours = stock["serving_default"], ours["serving_default"]
        self._with_state, self._copy = ours["with_state"], ours["copy_state"]
        self._whole, self._since, self._before = flat(whole), flat(since), size.events
        no_events = tf.zeros([1], tf.int64)
        self._with_state(**flat(seen), user=tf.constant([SOURCE], tf.int64), events_before=no_events)
        self.prepare()
        cached = ours["state_statistics"]()
        self.cache_bytes_per_user = float(cached["bytes"]) / float(cached["states"])

    def prepare(self) -> None:
        """Gives every user the state of SOURCE, with the events of a history and none since."""
        for begin in range(1, self._users + 1, _COPIES):
            self._copy(users=tf.range(begin, begin + _COPIES, dtype=tf.int64))

    def ask(self, kind: str, number: int) -> dict[str, tf.Tensor]:
        """Sends a request and waits for its answer. With kept states, every number is another user."""
        if kind != "state":
            return _arrays((self._stock if kind == "stock" else self._ours)(**self._whole))
        user = tf.constant([1 + number % self._users], tf.int64)
        answer = self._with_state(**self._since, user=user, events_before=tf.constant([self._before], tf.int64))
        if not answer["found"].numpy().all():
            raise harness.CheckFailed(f"user {user.numpy()} has no state with {self._before} events")
        return _arrays({task: answer[task] for task in self._tasks})

    def check(self) -> float:
        """Returns the largest difference of the answers. Raises CheckFailed if they do not come from one model."""
        stock, *others = (self.ask(kind, 0) for kind in KINDS)
        for other in others:
            for task, answer in stock.items():
                harness.check_close(task, other[task], answer, relative=1e-4, reason="sums in another order")
        self.prepare()
        return max(float(np.abs(other[task] - answer).max()) for other in others for task, answer in stock.items())


def _copy(cache: StateCache) -> fr.Signature:
    """Gives users <int64>[n] the state of SOURCE."""

    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        users, version = inputs["users"], cache.version()
        found = cache.find(tf.fill(tf.shape(users), tf.constant(SOURCE, tf.int64)), version, users >= 0)
        written = users, version, tf.zeros_like(users), found.row_splits, found.of_tokens, found.of_users
        kept = cache.write(*written)
        return {"kept": kept}

    return fr.Signature(function, {"users": tf.TensorSpec([None], tf.int64)}, (cache,))


def _arrays(answer: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in answer.items()}


def load_fields(config: str, size: Request, folder: pathlib.Path, load: Load) -> dict[str, Any]:
    """Returns the fields of each server. Its requests come at half the rate of one after another."""
    servers = Servers(config, size, folder, load.requests)
    fields: dict[str, Any] = {"max_difference": servers.check()}
    fields["cache_bytes_per_user"] = servers.cache_bytes_per_user
    for kind in KINDS:
        ask = functools.partial(servers.ask, kind)
        alone_s = harness.measure({kind: functools.partial(ask, 0)}, warmup=1, repeats=4)[kind].median_s
        servers.prepare()
        latencies = latencies_ms(ask, 0.5 / alone_s, load)
        p50_ms, p99_ms = (float(x) for x in np.percentile(latencies, [50, 99]))
        fields[kind] = {
            "alone_ms": 1e3 * alone_s, "rate": 0.5 / alone_s, "requests": len(latencies), "p50_ms": p50_ms,
            "p99_ms": p99_ms,
        }  # fmt: skip
    return fields
