"""benchmarks.serving, tiny: it writes its fields, and stops when the servers disagree."""

import json
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.serving import __main__ as serving
from benchmarks.serving.load import Load, highest_rate, latencies_ms
from models.experiment import load
from tf_fusedrec import tf


@pytest.mark.nightly
def test_fields(tmp_path, monkeypatch):
    tiny = serving.Size(
        items=300,
        requests=6,
        load=serving.Load(requests=25, seconds=0.1, trials=2),
        long=serving.Request(events=20, new=3, candidates=4, rounds=2),
        large=serving.Request(events=20, new=3, candidates=4, rounds=1),
        others=(),
        updates=serving.Updates(windows=1, every=0.3),
        clicks=serving.Clicks(users=50, items=50, samples=1000, held_out=500, epochs=1),
        catalogue=serving.Catalogue(items=1000, users=60, topics=10, dim=8, batch=16, steps=3, asked=4, rounds=2),
    )
    monkeypatch.setattr(serving, "QUICK", tiny)
    monkeypatch.setattr(serving, "BATCHES", (1, 2))
    monkeypatch.setattr(sys, "argv", ["serving", "--quick", "--json", str(tmp_path / "result.json")])
    serving.main()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    for field in ("p50_ms", "p99_ms"):
        assert {ops: set(of_batch) for ops, of_batch in result[field].items()} == {
            "stock": {"1", "2"},
            "ours": {"1", "2"},
        }
    assert all(result["p99_ms"][ops][n] >= result["p50_ms"][ops][n] > 0 for ops in ("stock", "ours") for n in "12")
    assert all(size > 1 for size in result["size_over_rows"].values())
    assert result["speedup_state"] > 0 and result["speedup_state_processor"] > 0
    assert result["speedup_state_4g"] > 0 and result["speedup_state_processor_4g"] > 0
    assert 0 <= result["max_difference_state"] < 1e-5
    assert 0 <= result["max_difference_state_4g"] < 1e-4
    assert result["p99_ratio_with_delta_every_10s"] > 0
    assert result["delta_visible_s"] > 0
    for kind in ("stock", "ours", "state"):
        of_kind = result["load_long"][kind]
        assert 0 < of_kind["p50_ms"] <= of_kind["p99_ms"] <= of_kind["p99.9_ms"] and of_kind["max_rate"] >= 0
    assert result["p99_ms_state"] == result["load_long"]["state"]["p99_ms"]
    assert result["max_rate_stock"] == result["load_long"]["stock"]["max_rate"]
    assert result["cache_bytes_per_user"] > 0
    assert result["int8_bytes_ratio"] == (64 + 4) / 256
    assert 0 <= result["recall_at_100_ivf"] <= 1
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
    given_up = latencies_ms(ask, 1000.0, load, give_up_ms=200)
    assert np.isinf(given_up[-1])

    def fails(number):
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        latencies_ms(fails, 100.0, load)


def test_the_highest_rate_is_found_by_bisection():
    tried = []

    def p99_at(rate):
        tried.append(rate)
        return 50.0 if rate <= 55 else 90.0

    assert 54 < highest_rate(p99_at, 10.0, trials=8) <= 55
    assert len(tried) == 8
    assert highest_rate(p99_at, 81.0, trials=8) == 0
    assert highest_rate(lambda rate: float("inf"), 10.0, trials=3) == 0


def test_servers_that_disagree_are_not_measured():
    def server(answer):
        return lambda **inputs: {"ctr": tf.constant([answer])}

    servers = {"stock": server(0.5), "ours": server(np.float32(0.51))}
    with pytest.raises(harness.CheckFailed, match="ctr"):
        serving.percentiles(servers, load(str(serving.CONFIG), []), 1, serving.Size(items=10, requests=2))
