"""Open-loop load: requests are sent at random times, whether or not earlier ones have been answered.

Times between requests are exponential (Poisson arrivals) with a stated rate. A latency counts from the intended time of
sending, so a slow answer delays nobody's clock. The first requests of a run are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable

import numpy as np

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
