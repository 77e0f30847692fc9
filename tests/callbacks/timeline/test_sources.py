"""Reads a complete and an unfinished log of Horovod."""

import json

import pytest

from tf_fusedrec.callbacks.timeline_events import EXCHANGE, WAIT, horovod_events

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
