"""Every benchmark of a single op runs with --quick, checks its op, and writes the documented fields."""

import importlib
import json

import numpy as np
import pytest

from benchmarks.harness import harness, op_case

AXES = {
    "segment_unique": {"n_ids", "zipf_alpha", "segments"},
    "rank_partition": {"n_ids", "segments", "ranks"},
    "recovery": {"direction", "n_ids", "dim"},
    "fuse_ids": {"n_ids", "features", "segments"},
    "join_messages": {"n_ids", "lookups", "ranks"},
    "initial_rows": {"n_ids", "dim", "exists_share"},
    "window_rows": {"n_ids", "pieces", "zipf_alpha"},
    "user_states": {"tokens", "blocks", "dtype"},
}
MEASURES = {
    "peer", "ms_ours", "ms_p90_ours", "ms_peer", "ms_p90_peer", "ratio", "ids_per_s", "bytes_per_s", "ms_floor"
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
def test_quick_run_writes_its_cases(name, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", [name, "--quick", "--json", str(path)])
    importlib.import_module(f"benchmarks.{name}.__main__").main()
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert cases
    for case in cases:
        assert AXES[name] | MEASURES <= set(case)
        assert all(case[measure] > 0 for measure in MEASURES - {"peer"})


def test_a_wrong_result_is_not_measured(monkeypatch):
    segment_unique = importlib.import_module("benchmarks.segment_unique.__main__")
    honest = segment_unique.segment_unique_oracle

    def wrong(ids, splits):
        unique, unique_splits, inverse = honest(ids, splits)
        return unique, unique_splits, np.roll(inverse, 1)

    monkeypatch.setattr(segment_unique, "segment_unique_oracle", wrong)
    with pytest.raises(harness.CheckFailed, match="inverse of ours"):
        segment_unique.measure(quick=True)


def test_measures_of_a_case(monkeypatch):
    times = {"ours": harness.Timing(0.002, 0.003), "peer": harness.Timing(0.004, 0.005)}
    monkeypatch.setattr(harness, "measure", lambda variants, warmup, repeats: times)
    work = {"ids": 10, "bytes_moved": 100, "memory_bytes_per_s": 1e5}
    case = op_case.measure_case({"n_ids": 10}, ours=list, peer=list, peer_name="list", **work, quick=True)
    assert case == {
        "n_ids": 10, "peer": "list", "ms_ours": 2.0, "ms_p90_ours": 3.0, "ms_peer": 4.0, "ms_p90_peer": 5.0,
        "ratio": 2.0, "ids_per_s": 5000.0, "bytes_per_s": 50000.0, "ms_floor": 1.0,
    }  # fmt: skip
