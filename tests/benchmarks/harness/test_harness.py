"""The harness: checks name what differs, failures end the process with exit code 1, results reach the JSON file."""

import json

import numpy as np
import pytest

from benchmarks.harness import harness
from benchmarks.harness.synthetic import Batches, ZipfIds, segment_ids


def test_check_equal_names_the_first_difference():
    harness.check_equal("ids", np.array([1, 2]), [1, 2])
    with pytest.raises(harness.CheckFailed, match=r"^ids: 2 entries differ, at \(1,\) got 5, want 2\.$"):
        harness.check_equal("ids", [1, 5, 6], [1, 2, 3])
    with pytest.raises(harness.CheckFailed, match=r"ids: shape \(1,\), want \(2,\)"):
        harness.check_equal("ids", [1], [1, 2])


def test_check_close_says_the_limit_and_its_reason():
    harness.check_close("loss", [1.0, 2.0], [1.0, 2.0 + 1e-6], relative=1e-6, reason="rounding")
    with pytest.raises(harness.CheckFailed, match=r"loss: 2\.1 at \(1,\), want 2\.0; .* may be 0\.02 \(rounding\)"):
        harness.check_close("loss", [1.0, 2.1], [1.0, 2.0], relative=1e-2, reason="rounding")


def test_check_close_refuses_nan():
    with pytest.raises(harness.CheckFailed, match="nan at"):
        harness.check_close("loss", [np.nan], [1.0], relative=1.0, reason="any")


def test_a_failed_check_ends_the_process_with_exit_code_1(capsys):
    def main():
        raise harness.CheckFailed("rows differ")

    with pytest.raises(SystemExit) as stop:
        harness.run(main)
    assert stop.value.code == 1
    assert "CHECK FAILED: rows differ" in capsys.readouterr().err


def test_measure_lets_variants_take_turns():
    order = []
    times = harness.measure(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warmup=1, repeats=2
    )  # fmt: skip
    assert sorted(order) == ["a"] * 3 + ["b"] * 3
    assert order[:4] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    assert all(0 <= t.median_s <= t.p90_s for t in times.values())


def test_timing_is_median_and_90th_percentile():
    assert harness.timing([1.0, 2.0, 3.0]) == harness.Timing(2.0, 2.8)


def test_report_writes_cases_with_machine_and_commit(tmp_path, capsys):
    path = tmp_path / "results.json"
    harness.report("title", [{"n_ids": 3, "ms_ours": 1.5}], harness.Arguments(quick=True, json=path))
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["cases"] == [{"n_ids": 3, "ms_ours": 1.5}]
    assert {"machine", "commit", "load_average", "benchmark"} <= set(written)
    assert "ms_ours" in capsys.readouterr().out


def test_an_empty_table_says_so(capsys):
    harness.print_table("title", [])
    assert "nothing was measured" in capsys.readouterr().out


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    with pytest.raises(harness.CheckFailed, match="needs 2 processes, got 3"):
        harness.on_ranks("benchmarks.train_step", 2)


def test_one_of_the_right_number_of_processes_goes_on(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    harness.on_ranks("benchmarks.train_step", 2)


def test_a_missing_horovodrun_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    monkeypatch.setattr(harness.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(harness.CheckFailed, match="horovodrun is not beside"):
        harness.on_ranks("benchmarks.train_step", 2)


def test_zipf_ids_are_skewed_scattered_and_within_40_bits():
    ids = ZipfIds(1000, 1.2).draw(np.random.default_rng(0), (20_000,))
    assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < 1 << 40
    _, counts = np.unique(ids, return_counts=True)
    counts.sort()
    assert len(counts) <= 1000
    # p(1) / p(2) = 2^1.2 = 2.3; 4000 draws of the hottest have a standard deviation of 2 %.
    assert 2.0 < counts[-1] / counts[-2] < 2.6


def test_batches_are_a_pure_function_of_step_and_rank():
    batches = Batches(features=3, batch_size=8, ids_per_feature=2, alpha=1.05)
    first, again, other = batches.batch(5, 1), batches.batch(5, 1), batches.batch(5, 0)
    assert first.ids.shape == (3, 8, 2) and first.labels.shape == (8,)
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert not np.array_equal(first.ids, other.ids)


def test_segment_ids_cover_all_ids():
    ids, splits = segment_ids(0, n_ids=10, zipf_alpha=1.05, segments=3)
    assert len(ids) == 10 and splits.tolist() == [0, 3, 6, 10]
