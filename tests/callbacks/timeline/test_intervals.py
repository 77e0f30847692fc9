"""Arithmetic of intervals against a clock that ticks every millisecond."""

import numpy as np
import pytest

from tf_fusedrec.callbacks import timeline_events
from tf_fusedrec.callbacks.timeline_events import COMPUTE, EXCHANGE, TABLE, WAIT, Event, step_times

TICKS = 60


def _random_events(seed):
    random = np.random.default_rng(seed)
    begins = random.integers(-5, TICKS, 12)
    ends = begins + random.integers(0, 15, 12)
    kinds = random.choice([EXCHANGE, WAIT, TABLE, COMPUTE], 12)
    return [Event(str(k), "", float(b), float(e), "") for k, b, e in zip(kinds, begins, ends)]


def _ticks(events, kinds):
    """<bool>[TICKS]: whether an event of these kinds runs in each tick."""
    running = np.zeros(TICKS, bool)
    for event in events:
        if event.kind in kinds:
            running[max(int(event.begin), 0) : max(int(event.end), 0)] = True
    return running


@pytest.mark.parametrize("seed", range(20))
def test_times_of_a_step_are_those_of_a_clock(seed):
    events = _random_events(seed)
    compute, exchange = _ticks(events, {TABLE, COMPUTE}), _ticks(events, {EXCHANGE})
    times = step_times(7, events, 0.0, float(TICKS))
    wanted = [compute.sum(), exchange.sum(), (exchange & ~compute).sum(), (~exchange & ~compute).sum()]
    got = [times.compute_ms, times.exchange_ms, times.exposed_ms, times.free_ms]
    np.testing.assert_array_equal(np.array(got) / 1e3, wanted)
    assert (times.number, times.step_ms) == (7, 1e3 * TICKS)


def test_nothing_happened():
    assert timeline_events.union([]) == [] and timeline_events.without([], [(0, 1)]) == []
    assert step_times(0, [], 1.0, 2.0) == (0, 1000.0, 0.0, 0.0, 0.0, 1000.0)
