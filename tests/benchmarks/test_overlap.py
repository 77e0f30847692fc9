"""benchmarks.overlap computes its figures, writes nulls without root, and runs on a tiny model with root."""

import json

import numpy as np
import pytest

from benchmarks.harness import network
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap.model import Size

WHY_NOT = network.why_not()
TABLE = {"step_ms": 1.0, "compute_ms": 1.0, "exchange_ms": 0.0, "exposed_ms": 0.0, "free_ms": 0.0}
MS = {
    "dense_only": [90, 100, 300],
    "dense_with_allreduce": [108, 108, 108],
    "exchange_only": [80, 80, 81],
    "sync": [190, 180, 170],
    "frozen_M4": [120, 120, 125],
    "dual": [170, 180, 180],
    "nested_M4": [110, 112.5, 115],
    "semi_async": [144, 144, 144],
    "2d": [150, 150, 150],
    "nested_2d": [105, 105, 105],
    "sync_file": [300, 300, 300],
    "dual_file": [200, 200, 200],
}


def test_figures_are_made_of_medians():
    one = overlap.case(1.0, {"ms": MS, "table": dict.fromkeys(MS, TABLE)})
    assert one["ratio"] == 100 / 80
    assert overlap.fields(one) == {
        "exposed_ratio_sync": 1.0,
        "exposed_ratio_frozen_M4": 0.25,
        "exposed_ratio_nested_M4": 12.5 / 80,
        "exposed_allreduce_ms": 8,
        "exposed_ms_2d": 50,
        "exposed_ms_nested": 12.5,
        "exposed_ms_nested_2d": 5,
        "speedup_frozen": 1.5,
        "speedup_dual": 1.0,
        "speedup_dual_file": 1.5,
        "speedup_nested": 1.6,
        "speedup_semi_async": 1.25,
        "speedup_2d": 1.2,
    }


def test_without_root_fields_are_null_and_the_reason_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(overlap.bytes_sent, "headline", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["overlap", "--quick", "--json", str(tmp_path / "overlap.json")])
    overlap.main()
    result = json.loads((tmp_path / "overlap.json").read_text(encoding="utf-8"))
    assert all(result[name] is None for name in (*overlap.fields(None), "bytes_ratio_clustered", "clustering_ms"))
    assert result["not_measured"] == "network namespaces need root" and result["cases"] == []
    assert "not measured: network namespaces need root" in capsys.readouterr().out


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_a_tiny_run(capsys):
    # 1 MB each way takes 2 x 8 ms on the wire, which is more than the noise of the processes.
    size = Size(users=8, history=60, exposures=4, dim=512, heads=2, batches=2)
    names = ["sync", "sync_file", "dual_file"]
    phases = [
        {"rate": "1gbit", "variants": names, "repeats": 3, "recorded": 3},
        {"rate": "200mbit", "variants": ["sync"], "repeats": 2, "recorded": 0},
    ]
    answer, slow = overlap.run_ranks(size, phases)
    assert np.median(slow["ms"]["exchange_only"]) > 2 * np.median(answer["ms"]["exchange_only"])
    one = overlap.case(1.0, answer)
    assert all(len(ms) == 3 and min(ms) > 0 for ms in answer["ms"].values())
    exchange, none = (one["table"][name]["exchange_ms"] for name in ("exchange_only", "dense_only"))
    assert exchange > max(4, none)  # half of the wire's time in one direction; `none` is the noise of two processes
    for times in one["table"].values():
        assert times["compute_ms"] + times["exposed_ms"] + times["free_ms"] == pytest.approx(times["step_ms"])
    overlap.show(one)
    said = capsys.readouterr().out
    assert "dual_file: traced" in said and "not overlapped" in said
