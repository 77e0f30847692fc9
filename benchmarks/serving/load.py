"""Open-loop load on three servers of one GRM: stock operations, ours, and ours with kept states.

Requests are sent at random times, whether or not earlier ones have been answered. Times between requests are
exponential (Poisson arrivals) with a stated rate. A latency counts from the intended time of sending, so a slow answer
delays nobody's clock. The first requests of a run are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.serving.state import Request, flat, long_model
from models.export import signatures_of
from models.kept_states import StateOptions
from tf_fusedrec import tf
from tf_fusedrec.saved_model.state_cache import StateCache


@dataclasses.dataclass(frozen=True)
class Load:
    """One run at one rate."""

    requests: int = 1000  # at most
    seconds: float = 20.0  # at most, but for the least number of requests, and apart from the waiting requests
    threads: int = 16  # requests that the client waits for at the same time


def latencies_ms(ask: Callable[[int], object], rate: float, load: Load) -> np.ndarray:
    """Sends requests at `rate` per second, and returns the latency of each after the warm-up, the first eighth.

    Args:
      ask: Sends the n-th request and waits for its answer. Threads call it.
      rate: Requests per second.
      load: Number of requests and threads.
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
