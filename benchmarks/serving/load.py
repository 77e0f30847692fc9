"""Open-loop load on three servers of one GRM: stock operations, ours, and ours with kept states.

Requests are sent at random times, whether or not earlier ones have been answered. Times between requests are
exponential (Poisson arrivals) with a stated rate. A latency counts from the intended time of sending, so a slow answer
delays nobody's clock. The first requests of a run are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tf_fusedrec as fr
from benchmarks.harness import harness
from benchmarks.serving.state import Request, long_model
from models.base import Batch
from models.export import signatures_of
from models.kept_states import StateOptions
from tf_fusedrec import tf
from tf_fusedrec.saved_model import StateCache

LIMIT_MS = 80.0  # of p99 at the highest rate


@dataclasses.dataclass(frozen=True)
class Load:
    """One run at one rate."""

    requests: int = 1000  # at most
    seconds: float = 20.0  # at most, but for the least number of requests, and apart from the waiting requests
    threads: int = 16  # requests that the client waits for at the same time
    trials: int = 6  # rates that highest_rate tries

    def count(self, rate: float) -> int:
        """Requests of a run at `rate` per second, with its warm-up: the first eighth, but at least 2 of 10."""
        return int(min(self.requests, max(10.0, rate * self.seconds)))


def latencies_ms(ask: Callable[[int], object], rate: float, load: Load, give_up_ms: float = 10_000) -> np.ndarray:
    """Sends requests at `rate` per second, and returns the latency of each after the warm-up.

    Args:
      ask: Sends the n-th request and waits for its answer. Threads call it.
      rate: Requests per second.
      load: Number of requests and threads.
      give_up_ms: Latency after which the run ends. The rest of the requests count as never answered, inf.
    """
    total = load.count(rate)
    after = np.cumsum(np.random.default_rng(total).exponential(1 / rate, total))
    failed: list[BaseException] = []
    found, numbers = np.full(total, np.inf), itertools.count()
    begin = time.perf_counter()

    def client() -> None:
        while not failed and (number := next(numbers)) < total:
            intended = begin + after[number]
            time.sleep(max(0.0, intended - time.perf_counter()))
            try:
                ask(number)
            except BaseException as error:
                failed.append(error)  # latencies_ms raises it.
                return
            found[number] = 1e3 * (time.perf_counter() - intended)
            if found[number] > give_up_ms:
                return

    threads = [threading.Thread(target=client) for _ in range(load.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found[max(2, total // 8) :]


def highest_rate(p99_at: Callable[[float], float], alone_ms: float, trials: int) -> float:
    """Returns the highest rate per second, of those tried, at which p99 is at most LIMIT_MS; 0 where none is.

    Args:
      p99_at: Latency in ms at a rate.
      alone_ms: Time of one request that comes alone. Rates up to 2 / alone_ms are tried, by bisection.
      trials: Number of rates.
    """
    passed, refused = 0.0, 2e3 / alone_ms
    if alone_ms > LIMIT_MS:
        return passed
    for _ in range(trials):
        rate = (passed + refused) / 2
        if p99_at(rate) <= LIMIT_MS:
            passed = rate
        else:
            refused = rate
    return passed


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
        self._with_state, self._copy, self._statistics = (
            ours[name] for name in ("with_state", "copy_state", "state_statistics")
        )
        self._whole, self._since, self._before = _flat(whole), _flat(since), size.events
        no_events = tf.zeros([1], tf.int64)
        self._with_state(**_flat(seen), user=tf.constant([SOURCE], tf.int64), events_before=no_events)
        self.prepare()
        self.cache_bytes_per_user = self._bytes_per_user()

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

    def _bytes_per_user(self) -> float:
        told = self._statistics()
        return float(told["bytes"]) / float(told["states"])


def _copy(cache: StateCache) -> fr.Signature:
    """Gives users <int64>[n] the state of SOURCE."""

    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        users, version = inputs["users"], cache.version()
        found = cache.find(tf.fill(tf.shape(users), tf.constant(SOURCE, tf.int64)), version, users >= 0)
        written = users, version, tf.zeros_like(users), found.row_splits, found.of_tokens, found.of_users
        kept = cache.write(*written)
        return {"kept": kept}

    return fr.Signature(function, {"users": tf.TensorSpec([None], tf.int64)}, (cache,))


def _flat(batch: Batch) -> dict[str, tf.Tensor]:
    """A batch in the form of a server's inputs."""
    flat = {name: of.values if isinstance(of, tf.RaggedTensor) else of for name, of in batch.items()}
    return {**flat, **{f"{role}_row_splits": batch[f"{role}_time"].row_splits for role in ("history", "exposed")}}


def _arrays(answer: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in answer.items()}


def load_fields(config: str, size: Request, folder: pathlib.Path, load: Load) -> dict[str, Any]:
    """Returns the fields of the three servers, by kind where a field has several values.

    Each kind gets requests at its own rate, half of what it answers one after another.
    """
    servers = Servers(config, size, folder, load.requests)
    difference = servers.check()
    alone = {}
    for kind in KINDS:
        times = harness.measure({kind: functools.partial(servers.ask, kind, 0)}, warmup=1, repeats=4)
        alone[kind] = 1e3 * times[kind].median_s
        servers.prepare()

    def run(kind: str, rate: float, give_up_ms: float) -> np.ndarray:
        servers.prepare()
        return latencies_ms(lambda number: servers.ask(kind, number), rate, load, give_up_ms)

    fields: dict[str, Any] = {}
    for kind, alone_ms in alone.items():
        rate = 0.5e3 / alone_ms
        found = run(kind, rate, math.inf)
        of_kind = {f"p{which}_ms": float(np.percentile(found, float(which))) for which in ("50", "99", "99.9")}

        def p99_at(at: float, kind: str = kind) -> float:
            return float(np.percentile(run(kind, at, 20 * LIMIT_MS), 99))

        of_kind["max_rate"] = highest_rate(p99_at, alone_ms, load.trials)
        fields[kind] = {"alone_ms": alone_ms, "rate": rate, "requests": len(found), **of_kind}
    return {**fields, "cache_bytes_per_user": servers.cache_bytes_per_user, "max_difference": difference}
