"""benchmarks.serving, tiny: it writes its fields, and stops when the servers disagree."""

import json
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.serving import __main__ as serving
from benchmarks.serving.load import Load, latencies_ms
from tf_fusedrec import tf


@pytest.mark.nightly
def test_figures_of_a_tiny_run(tmp_path, monkeypatch):
    tiny = serving.Size(
        items=300,
        requests=6,
        load=serving.Load(requests=25, seconds=0.1),
        long=serving.Request(events=20, new=3, candidates=4, rounds=2),
        large=serving.Request(events=20, new=3, candidates=4, rounds=1),
        updates=serving.Updates(windows=1, every=0.3),
        clicks=serving.Clicks(users=50, items=50, samples=1000, held_out=500, epochs=1),
        catalogue=serving.Catalogue(items=1000, users=60, topics=10, dim=8, batch=16, steps=3, asked=4, rounds=2),
    )
    monkeypatch.setattr(serving, "QUICK", tiny)
    monkeypatch.setattr(serving, "BATCHES", (1, 2))
    monkeypatch.setattr(sys, "argv", ["serving", "--quick", "--json", str(tmp_path / "result.json")])
    serving.main()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert all(size > 1 for size in result["size_over_rows"].values())
    assert 0 <= result["max_difference_state"] < 1e-5 and 0 <= result["max_difference_state_4g"] < 1e-4
    for kind in ("stock", "ours", "state"):
        assert 0 < result["load"][kind]["p50_ms"] <= result["load"][kind]["p99_ms"]
    assert result["int8_bytes_ratio"] == (64 + 4) / 256
    assert 0 <= result["auc_difference_int8"] < 1e-2  # 500 samples


def test_latencies_count_from_the_intended_time():
    """Every request takes 20 ms where one is answered at a time: at 100 per second they wait ever longer."""
    lock = threading.Lock()

    def ask(number):
        with lock:
            time.sleep(0.02)

    load = Load(requests=45, seconds=1.0, threads=4)
    waits = latencies_ms(ask, 100.0, load)
    assert waits.shape == (40,) and waits.min() >= 20
    assert waits[-10:].mean() > 200  # 45 requests arrive in 450 ms and take 900.

    def fails(number):
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        latencies_ms(fails, 100.0, load)


def test_servers_that_disagree_are_not_measured():
    def server(answer):
        return lambda **inputs: {"ctr": tf.constant([answer])}

    servers = {"stock": server(0.5), "ours": server(np.float32(0.51))}
    with pytest.raises(harness.CheckFailed, match="ctr"):
        serving.medians_ms(servers, [{}], 2)
