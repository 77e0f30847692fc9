"""Arithmetic of intervals against a clock that ticks every millisecond, and the reader of Horovod's logs."""

import json

import numpy as np
import pytest

from tf_fusedrec.callbacks import timeline_events
from tf_fusedrec.callbacks.timeline_events import COMPUTE, EXCHANGE, TABLE, WAIT, Event, horovod_events, step_times

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
        if event.lane in kinds:
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


LOG = [
    {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 5_000_000}},
    {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "scope/layer.group.0.rows"}},
    {"ph": "B", "name": "NEGOTIATE_ALLTOALL", "ts": 1_000_000, "pid": 1},
    {"ph": "X", "name": "1", "ts": 1_100_000, "pid": 1, "dur": 0},
    {"ph": "E", "ts": 1_250_000, "pid": 1},
    {"ph": "B", "name": "ALLTOALL", "ts": 1_500_000, "pid": 1},
    {"ph": "B", "name": "MPI_ALLTOALL", "ts": 1_600_000, "pid": 1},
    {"ph": "E", "ts": 1_700_000, "pid": 1},
    {"ph": "E", "ts": 2_000_000, "pid": 1},
    {"ph": "E", "ts": 2_500_000, "pid": 1},  # its begin precedes the log
]


def test_exchanges_and_waits_are_read_and_their_parts_left_out(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(LOG), encoding="utf-8")
    assert horovod_events(tmp_path / "log.json") == [
        (WAIT, "alltoall layer.group.0.rows", 6.0, 6.25, "horovod"),
        (EXCHANGE, "alltoall layer.group.0.rows", 6.5, 7.0, "horovod"),
    ]


def test_a_log_that_does_not_end_is_given_up(tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(LOG)[:-1], encoding="utf-8")
    with pytest.raises(TimeoutError, match="did not finish .*log.json within 0.2 s"):
        horovod_events(tmp_path / "log.json", timeout_s=0.2)
    with pytest.raises(TimeoutError, match="did not finish"):
        horovod_events(tmp_path / "none.json", timeout_s=0.2)
