"""benchmarks.serving, tiny: it writes its fields, and stops when the servers disagree."""

import json
import sys

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.serving import __main__ as serving
from models.experiment import load
from tf_fusedrec import tf


def test_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "QUICK", serving.Size(items=300, requests=6))
    monkeypatch.setattr(serving, "BATCHES", (1, 2))
    monkeypatch.setattr(serving, "REQUEST", serving.Request(events=20, new=3, candidates=4, rounds=2))
    monkeypatch.setattr(serving, "UPDATES", serving.Updates(windows=1, every=0.3))
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
    assert result["speedup_state"] > 0
    assert 0 <= result["max_difference_state"] < 1e-5
    assert result["p99_ratio_with_delta_every_10s"] > 0
    assert result["delta_visible_s"] > 0


def test_servers_that_disagree_are_not_measured():
    def server(answer):
        return lambda **inputs: {"ctr": tf.constant([answer])}

    servers = {"stock": server(0.5), "ours": server(np.float32(0.51))}
    with pytest.raises(harness.CheckFailed, match="ctr"):
        serving.percentiles(servers, load(str(serving.CONFIG), []), 1, serving.Size(items=10, requests=2))
